#include <math.h>

void c_elementwise(PARAMETERS) {
  for (int i = 0; i < COUNT; i++) {
    EPILOGUE
    out[i] = result;
  }
}
