#include <math.h>

/* LANES partial sums of one row, so that the compiler may use vectors; a row's own remainder goes to the first ones. */
static float dot(const float* row, const float* x) {
  float part[LANES] = {0};
  for (int k = 0; k + LANES <= K; k += LANES)
    for (int lane = 0; lane < LANES; lane++) part[lane] += row[k + lane] * x[k + lane];
  for (int k = K / LANES * LANES; k < K; k++) part[k % LANES] += row[k] * x[k];
  float sum = part[0];
  for (int lane = 1; lane < LANES; lane++) sum += part[lane];
  return sum;
}

void c_linear(PARAMETERS) {
  for (int i = 0; i < N; i++) {
    const float acc0 = dot(weight + (long)i * K, x);
#if PAIR == 2
    const float acc1 = dot(weight + (long)(N + i) * K, x);
#endif
    EPILOGUE
    out[i] = result;
  }
}
