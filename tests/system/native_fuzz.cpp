// The kernels, and what they are made of, for native_fuzz.py.
#include "kernels.cpp"

extern "C" int lanes() { return LANES; }

extern "C" void vectors_exponential(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats e = exponential(load<Floats>(x + i));
        std::memcpy(y + i, &e, sizeof e);
    }
}

extern "C" void vectors_transpose(float* x) {  // LANES x LANES
    Floats rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = load<Floats>(x + i * LANES);
    transpose(rows);
    for (int i = 0; i < LANES; i++) std::memcpy(x + i * LANES, &rows[i], sizeof rows[i]);
}

extern "C" void best(const float* scores, int64_t rows, int64_t size, int64_t step, int64_t* tokens, int threads) {
    best_tokens(scores, rows, size, step, tokens, threads);
}

extern "C" void layers_norm(const float* x, const float* weight, double eps, float* y, int64_t dim) {
    norm(x, weight, eps, y, dim);
}

extern "C" void layers_gate(const float* gates, const float* ups, float* y, int64_t count) {
    gate(gates, ups, y, count);
}

extern "C" void layers_rotate(float* x, const float* cosines, const float* sines, int64_t dim) {
    rotate(x, cosines, sines, dim);
}
