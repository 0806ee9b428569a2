/* Reads files as the importer does, from memory that ends where they end: for the sanitizers. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct reader;
struct reader *ncp_dumps_new(void);
void ncp_dumps_free(struct reader *r);
int64_t ncp_dumps_read(struct reader *r, const uint8_t *data, int64_t length);
int64_t ncp_dumps_columns(struct reader *r, int64_t *wide, int32_t *narrow, uint8_t *is_p2p,
                          int64_t n);

int main(int argc, char **argv) {
  struct reader *r = ncp_dumps_new();
  int taken = 0;
  for (int i = 1; i < argc; i++) {
    FILE *f = fopen(argv[i], "rb");
    if (f == NULL) return 2;
    fseek(f, 0, SEEK_END);
    long length = ftell(f);
    rewind(f);
    uint8_t *data = malloc((size_t)length);
    if (fread(data, 1, (size_t)length, f) != (size_t)length) return 2;
    fclose(f);
    int64_t n = ncp_dumps_read(r, data, length);
    if (n > 0) {
      int64_t *wide = malloc((size_t)n * 7 * sizeof *wide);
      int32_t *narrow = malloc((size_t)n * 3 * sizeof *narrow);
      uint8_t *is_p2p = malloc((size_t)n);
      taken += ncp_dumps_columns(r, wide, narrow, is_p2p, n) > 0;
      free(wide);
      free(narrow);
      free(is_p2p);
    }
    free(data);
  }
  ncp_dumps_free(r);
  printf("%d\n", taken);
  return 0;
}
