// LoadPredictor: how long a read of n bytes from a tier takes, from what earlier reads took.
//
// A line through (bytes, seconds) by least squares, old reads weighing less and less: its height at
// 0 is the latency, its slope the time per byte. A tier that nobody asks any more, as it was slow,
// is tried again from time to time. Thread-safe.
#ifndef QUIRE_STORE_TIERED_LOAD_PREDICTOR_H_
#define QUIRE_STORE_TIERED_LOAD_PREDICTOR_H_

#include <cstdint>
#include <mutex>

namespace quire {

class LoadPredictor {
 public:
  void Measured(int64_t bytes, double seconds);
  // Seconds, 0 if nothing was measured.
  double Predict(int64_t bytes) const;
  // Whether to read rather than to compute for these seconds; 0 = computing is no choice.
  // Nothing measured: yes.
  bool IsWorth(int64_t bytes, double compute_seconds) const;
  // The same, but counts the refusal; now and then one is let through, so that it is measured.
  bool Allow(int64_t bytes, double compute_seconds);

  struct Summary {
    double latency_seconds = 0;
    double bytes_per_second = 0;
    int64_t loads = 0;
    int64_t not_worth = 0;
    double predicted_seconds = 0;
    double measured_seconds = 0;
  };
  Summary Summarize() const;

 private:
  struct Line {
    double latency_seconds = 0;
    double seconds_per_byte = 0;
  };
  Line Fit() const;
  double PredictLocked(int64_t bytes) const;
  bool IsWorthLocked(int64_t bytes, double compute_seconds) const;

  mutable std::mutex mutex_;
  int64_t loads_ = 0;
  int64_t not_worth_ = 0;
  int64_t refused_in_a_row_ = 0;
  double predicted_seconds_ = 0;
  double measured_seconds_ = 0;
  // Weighted means of bytes, seconds and their products.
  double bytes_ = 0, seconds_ = 0, bytes_squared_ = 0, product_ = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_LOAD_PREDICTOR_H_
