/* What the native reader of call lines knows of functions, fields and texts. */
#ifndef NCP_LINES_TABLES_H
#define NCP_LINES_TABLES_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum {
  MAX_APIS = 128,
  MAX_NAME = 48,     /* of a function or a field */
  MAX_FIELDS = 64,   /* bits of a set of fields */
  MAX_STRINGS = 64,  /* datatypes and reductions */
  MAX_STRING = 32,
  MAX_SIGNATURES = 1 << 14,
  SLOTS = 2 * MAX_SIGNATURES,
  API_SLOTS = 4 * MAX_APIS,
};

struct api {
  char name[MAX_NAME];
  uint32_t length;
  int32_t code;
  uint32_t needs;
};

struct signature {
  int64_t count, root;
  int32_t code, datatype, op;
};

struct scanner {
  struct api apis[API_SLOTS];
  uint32_t n_apis;
  char fields[MAX_FIELDS][MAX_NAME]; /* all that a line may have */
  uint32_t field_lengths[MAX_FIELDS];
  uint32_t n_fields;
  uint64_t counted; /* of the fields, which are counted */
  int64_t max_peer;
  char strings[MAX_STRINGS][MAX_STRING];
  uint32_t lengths[MAX_STRINGS];
  uint32_t n_strings;
  struct signature signatures[MAX_SIGNATURES];
  uint32_t n_signatures;
  int32_t slots[SLOTS]; /* signature + 1; 0: free */
};

struct text {
  const char *at;
  uint32_t length;
};

/* Number of a datatype or a reduction; -1: no room for one more. */
int32_t find_string(struct scanner *s, struct text x);

/* Number of a signature; -1: no room for one more. */
int32_t find_signature(struct scanner *s, const struct signature *x);

/* NULL: a function that nobody has told of. */
const struct api *find_api(const struct scanner *s, struct text name);

/* The bit of a field; 0: nobody has told of it. */
uint64_t find_field(const struct scanner *s, struct text name);

#endif
