/* What is beside the entries of a dump, and the texts that their columns refer to, as one
 * pickle: a list of the dump without its entries, names, datatypes, groups, whether any has
 * begun, and the calls that differ, each as four numbers of 8 bytes.
 */
#include <string.h>

#include "values.h"

/* A dump is not nested as deeply as this. */
#define MAX_DEPTH 16
/* So much is written at most: twice what was read, as values may be shared, and some. */
#define SOME_BYTES (64 << 10)

static int write_bytes(struct reader *r, const void *bytes, size_t n) {
  if (n > 2 * r->length + SOME_BYTES - r->n_rest || !make_room(r, &r->rest, r->n_rest + n, 1))
    return 0;
  memcpy((uint8_t *)r->rest.at + r->n_rest, bytes, n);
  r->n_rest += n;
  return 1;
}

static int write_code(struct reader *r, char code) { return write_bytes(r, &code, 1); }

/* A code and a number of some bytes, the lowest first. */
static int write_number(struct reader *r, const char *code, uint64_t x, size_t bytes) {
  uint8_t b[8];
  for (size_t i = 0; i < bytes; i++) b[i] = (uint8_t)(x >> 8 * i);
  return write_bytes(r, code, strlen(code)) && write_bytes(r, b, bytes);
}

static int write_text(struct reader *r, uint32_t ref) {
  const struct text *t = texts(r) + ref;
  return write_number(r, "X", t->length, 4) && write_bytes(r, t->at, t->length);
}

static int write_value(struct reader *r, struct value v, int depth) {
  switch (v.kind) {
    case NONE:
      return write_code(r, 'N');
    case NO:
      return write_bytes(r, "\x89", 1);
    case YES:
      return write_bytes(r, "\x88", 1);
    case INTEGER:
      return write_number(r, "\x8a\x08", (uint64_t)v.number, 8);
    case FLOAT:
      return write_number(r, "G", (uint64_t)v.number, 8);
    case TEXT:
      return write_text(r, v.ref);
    default:
      break;
  }
  if (depth == MAX_DEPTH) return 0;
  if (v.kind == LIST && !write_code(r, ']')) return 0;
  if (v.kind == DICT && !write_code(r, '}')) return 0;
  if (!write_code(r, '(')) return 0;
  const struct value *part = items(r, v);
  for (uint32_t n = several(r, v)->n; n > 0; n--)
    if (!write_value(r, *part++, depth + 1)) return 0;
  return write_code(r, v.kind == LIST ? 'e' : v.kind == DICT ? 'u' : 't');
}

static int write_dump(struct reader *r) {
  const struct value *v = items(r, r->result);
  if (!write_bytes(r, "}(", 2)) return 0;
  for (uint32_t n = several(r, r->result)->n; n > 0; n -= 2, v += 2) {
    if (is(texts(r) + v->ref, "entries")) continue;
    if (!write_text(r, v->ref) || !write_value(r, v[1], 0)) return 0;
  }
  return write_code(r, 'u');
}

static int write_list(struct reader *r, const struct array *list, size_t n) {
  if (!write_bytes(r, "](", 2)) return 0;
  for (size_t i = 0; i < n; i++)
    if (!write_value(r, values(list)[i], 0)) return 0;
  return write_code(r, 'e');
}

static int write_canon(struct reader *r, uint32_t at) {
  return write_text(r, ((const struct canon *)r->canons.at)[at].text);
}

static int write_groups(struct reader *r) {
  const struct group *g = r->groups.at;
  if (!write_bytes(r, "](", 2)) return 0;
  for (size_t i = 0; i < r->n_groups; i++, g++) {
    int is_text = g->id.kind == TEXT;
    if (!write_code(r, '(')) return 0;
    if (!(is_text ? write_canon(r, g->id.ref) : write_value(r, g->id, 0))) return 0;
    if (!write_canon(r, g->name) || !write_canon(r, g->desc) || !write_code(r, 't')) return 0;
  }
  return write_code(r, 'e');
}

static int write_calls(struct reader *r) {
  size_t bytes = r->n_calls * sizeof(struct call);
  return bytes <= UINT32_MAX && write_number(r, "B", bytes, 4) &&
         write_bytes(r, r->calls.at, bytes);
}

int write_rest(struct reader *r) {
  r->n_rest = 0;
  return write_bytes(r, "\x80\x03](", 4) && write_dump(r) &&
         write_list(r, &r->names, r->n_names) && write_list(r, &r->types, r->n_types) &&
         write_groups(r) && write_bytes(r, r->begun ? "\x88" : "\x89", 1) && write_calls(r) &&
         write_bytes(r, "e.", 2);
}
