// What Python calls (see kernels.py and compiled.py). Tensors are float32 and lie on a CPU. Returned is whether there
// was memory enough.

#include <new>

#include "draws.h"
#include "filters.h"
#include "layers.h"

namespace {

template <class Compute>
bool fits(Compute compute) {
    try {
        compute();
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

}  // namespace

extern "C" int panel_rows() { return PANEL; }

// format: a place in MULTIPLY.
extern "C" bool product(int64_t format, const uint8_t* w, const float* x, float* y, int64_t rows, int64_t in,
                        int64_t out, int threads) {
    return fits([&] { MULTIPLY[format](w, x, y, rows, in, out, false, threads); });
}

extern "C" bool attention(const float* q, const float* k, const float* v, const float* mask, float* out,
                          const Attention* sizes, float scale, int threads) {
    return fits([&] { attention(*sizes, q, k, v, {mask, nullptr}, nullptr, nullptr, out, scale, threads); });
}

extern "C" bool layers(const Layer* layer, int64_t count, const Attention* sizes, int64_t dim, int64_t inner,
                       float* hidden, const float* cosines, const float* sines, const float* mask, const int64_t* rows,
                       const int64_t* starts, const int64_t* slots, float scale, int threads) {
    return fits([&] {
        layers(layer, count, *sizes, dim, inner, hidden, cosines, sines, mask, rows, starts, slots, scale, threads);
    });
}

extern "C" bool pass(const Around* around, const Layer* layer, int64_t count, const Attention* sizes, int64_t dim,
                     int64_t inner, const int64_t* ids, const int64_t* rows, const int64_t* starts,
                     const int64_t* slots, const int64_t* asked, float* scores, int64_t* best, float scale,
                     int threads) {
    return fits([&] {
        pass(*around, layer, count, *sizes, dim, inner, ids, rows, starts, slots, asked, scores, best, scale, threads);
    });
}

// laws [rows, size].
extern "C" bool draw(const float* laws, int64_t rows, int64_t size, const double* uniforms, int64_t* tokens,
                     int threads) {
    return fits([&] { each(laws, rows, size, uniforms, tokens, threads, drawn); });
}

extern "C" bool race(const float* laws, int64_t rows, int64_t size, const uint64_t* keys, int64_t* tokens,
                     int threads) {
    return fits([&] { each(laws, rows, size, keys, tokens, threads, winner); });
}

// scores [rows, size], which are not NaN.
extern "C" bool top_k(const float* scores, int64_t rows, int64_t size, const double* counts, float* found,
                      int threads) {
    return fits([&] { each(scores, rows, size, counts, found, threads, least_of_top_k); });
}

extern "C" bool top_p(const float* scores, int64_t rows, int64_t size, const double* shares, float* found,
                      int threads) {
    return fits([&] { each(scores, rows, size, shares, found, threads, least_of_top_p); });
}
