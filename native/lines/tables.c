/* Functions, fields, texts and signatures of the native reader of call lines: told by the
 * analyzer, or learnt from lines, each with its number.  Nothing grows beyond its room.
 */
#include "tables.h"

#include <stdlib.h>
#include <string.h>

static uint32_t hash_bytes(const char *at, uint32_t length) {
  uint32_t h = 2166136261u;
  for (uint32_t i = 0; i < length; i++) h = (h ^ (uint8_t)at[i]) * 16777619u;
  return h;
}

static uint64_t mix(uint64_t h, uint64_t x) {
  h = (h ^ x) * 0x9E3779B97F4A7C15u;
  return h ^ (h >> 29);
}

EXPORT struct scanner *ncp_lines_new(int64_t max_peer) {
  struct scanner *s = calloc(1, sizeof *s);
  if (s != NULL) s->max_peer = max_peer;
  return s;
}

EXPORT void ncp_lines_free(struct scanner *s) { free(s); }

/* Adds a function; 0 when it does not fit. */
EXPORT int ncp_lines_api(struct scanner *s, const char *name, int32_t code, uint32_t needs) {
  size_t length = strlen(name);
  if (length == 0 || length > MAX_NAME || s->n_apis >= MAX_APIS) return 0;
  uint32_t at = hash_bytes(name, (uint32_t)length) % API_SLOTS;
  while (s->apis[at].length != 0) at = (at + 1) % API_SLOTS;
  memcpy(s->apis[at].name, name, length);
  s->apis[at].length = (uint32_t)length;
  s->apis[at].code = code;
  s->apis[at].needs = needs;
  s->n_apis++;
  return 1;
}

/* Adds the name of a field that a line may have, whose lines are counted or not; 0 when it
 * does not fit. */
EXPORT int ncp_lines_field(struct scanner *s, const char *name, int counted) {
  size_t length = strlen(name);
  if (length == 0 || length > MAX_NAME || s->n_fields >= MAX_FIELDS) return 0;
  memcpy(s->fields[s->n_fields], name, length);
  s->field_lengths[s->n_fields] = (uint32_t)length;
  s->counted |= (uint64_t)(counted != 0) << s->n_fields++;
  return 1;
}

uint64_t find_field(const struct scanner *s, struct text name) {
  for (uint32_t i = 0; i < s->n_fields; i++)
    if (s->field_lengths[i] == name.length && memcmp(s->fields[i], name.at, name.length) == 0)
      return (uint64_t)1 << i;
  return 0;
}

const struct api *find_api(const struct scanner *s, struct text name) {
  uint32_t at = hash_bytes(name.at, name.length) % API_SLOTS;
  for (; s->apis[at].length != 0; at = (at + 1) % API_SLOTS)
    if (s->apis[at].length == name.length && memcmp(s->apis[at].name, name.at, name.length) == 0)
      return &s->apis[at];
  return NULL;
}

int32_t find_string(struct scanner *s, struct text x) {
  for (uint32_t i = 0; i < s->n_strings; i++)
    if (s->lengths[i] == x.length && memcmp(s->strings[i], x.at, x.length) == 0)
      return (int32_t)i;
  if (s->n_strings == MAX_STRINGS || x.length > MAX_STRING) return -1;
  memcpy(s->strings[s->n_strings], x.at, x.length);
  s->lengths[s->n_strings] = x.length;
  return (int32_t)s->n_strings++;
}

int32_t find_signature(struct scanner *s, const struct signature *x) {
  uint64_t h = mix(mix((uint64_t)x->count, (uint64_t)x->root), (uint64_t)(uint32_t)x->code);
  h = mix(h, ((uint64_t)(uint32_t)x->datatype << 32) | (uint32_t)x->op);
  uint32_t at = (uint32_t)(h >> 7) % SLOTS;
  for (; s->slots[at] != 0; at = (at + 1) % SLOTS) {
    const struct signature *y = &s->signatures[s->slots[at] - 1];
    if (y->count == x->count && y->root == x->root && y->code == x->code &&
        y->datatype == x->datatype && y->op == x->op)
      return s->slots[at] - 1;
  }
  if (s->n_signatures == MAX_SIGNATURES) return -1;
  s->signatures[s->n_signatures++] = *x;
  s->slots[at] = (int32_t)s->n_signatures;
  return s->slots[at] - 1;
}

/* How many signatures are known. */
EXPORT uint32_t ncp_lines_signatures(const struct scanner *s) { return s->n_signatures; }

/* A signature: numbers[] = code, count, root; texts of up to MAX_STRING bytes and a 0. */
EXPORT int ncp_lines_signature(const struct scanner *s, uint32_t i, int64_t *numbers,
                               char *datatype, char *op) {
  if (i >= s->n_signatures) return 0;
  const struct signature *x = &s->signatures[i];
  numbers[0] = x->code;
  numbers[1] = x->count;
  numbers[2] = x->root;
  memset(datatype, 0, MAX_STRING + 1);
  memset(op, 0, MAX_STRING + 1);
  if (x->datatype >= 0) memcpy(datatype, s->strings[x->datatype], s->lengths[x->datatype]);
  if (x->op >= 0) memcpy(op, s->strings[x->op], s->lengths[x->op]);
  return 1;
}

/* Forgets all signatures and their texts. */
EXPORT void ncp_lines_forget(struct scanner *s) {
  s->n_signatures = 0;
  s->n_strings = 0;
  memset(s->slots, 0, sizeof s->slots);
}
