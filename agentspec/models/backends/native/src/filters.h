// Where top-k and top-p cut off scores [size] (see sampling.py): the least score that is kept. NaN counts as no score.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

// The greatest score of each run of RUN, and the scores that are near the greatest of all.
class Scores {
   public:
    Scores(const float* scores, int64_t size) : scores_(scores), size_(size), most_((size + RUN - 1) / RUN) {
        for (size_t run = 0; run < most_.size(); run++) {
            Floats nearest = Floats{} - INFINITY;
            int64_t i = run * RUN;
            for (; i + LANES <= end(run); i += LANES) {
                const Floats some = load<Floats>(scores + i);
                nearest = some > nearest ? some : nearest;
            }
            float most = reduced(nearest, [](float x, float y) { return std::max(x, y); });
            for (; i < end(run); i++) most = std::max(most, scores[i]);
            most_[run] = most;
            greatest = std::max(greatest, most);
        }
    }

    // Those that are at most so much less than the greatest, in any order; none where the greatest is infinite.
    std::vector<float> within(float distance) const { return from(greatest - distance); }

    // Those that are no less than one of them, in any order.
    std::vector<float> from(float least) const {
        std::vector<float> found;
        for (size_t run = 0; run < most_.size(); run++)
            for (int64_t i = run * RUN; most_[run] >= least && i < end(run); i++)
                if (scores_[i] >= least) found.push_back(scores_[i]);
        return found;
    }

    // The sum of e^(score - greatest).
    double mass() const {
        double sum = 0;
        for (size_t run = 0; run < most_.size(); run++) {
            Floats masses = {};
            int64_t i = run * RUN;
            for (; i + LANES <= end(run); i += LANES) masses += exponential(load<Floats>(scores_ + i) - greatest);
            sum += reduced(masses, [](float x, float y) { return x + y; });
            for (; i < end(run); i++) sum += std::exp(scores_[i] - greatest);
        }
        return sum;
    }

    float greatest = -INFINITY;

   private:
    int64_t end(int64_t run) const { return std::min(size_, (run + 1) * RUN); }

    const float* scores_;
    int64_t size_;
    std::vector<float> most_;
};

constexpr float FAR = 128;  // what is further from the greatest has no mass

// The count-th greatest; -infinity where fewer have a score.
float least_of_top_k(const float* scores, int64_t size, double count) {
    const int64_t known = std::count_if(scores, scores + size, [](float score) { return score > -INFINITY; });
    if (!(count >= 1 && count <= known)) return -INFINITY;
    const Scores all(scores, size);
    std::vector<float> near;
    for (float distance = 4; distance <= FAR && near.size() < count; distance *= 2) near = all.within(distance);
    if (near.size() < count) near = all.from(std::numeric_limits<float>::lowest());  // all that have a score
    const auto last = near.begin() + (int64_t)count - 1;
    std::nth_element(near.begin(), last, near.end(), std::greater<float>());
    return *last;
}

// The last of those that are needed, greatest first, for this share of the mass; +infinity has all of it.
float least_of_top_p(const float* scores, int64_t size, double share) {
    const Scores all(scores, size);
    if (!std::isfinite(all.greatest)) return all.greatest;
    const double wanted = share * all.mass();
    float least = all.greatest;
    for (float distance = 4; distance <= 2 * FAR; distance *= 2) {
        std::vector<float> near = all.within(distance);
        std::sort(near.begin(), near.end(), std::greater<float>());
        double before = 0;
        for (const float score : near)
            if ((before += std::exp(score - all.greatest)) >= wanted) return score;
        least = near.back();
    }
    return least;  // rounding left less than is wanted
}

}  // namespace
