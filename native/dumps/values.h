/* What the native reader of flight recorder dumps makes of a pickle: plain values. */
#ifndef NCP_DUMPS_VALUES_H
#define NCP_DUMPS_VALUES_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum kind { ABSENT, NONE, NO, YES, INTEGER, FLOAT, TEXT, LIST, TUPLE, DICT };

/* `ref`: place in `texts` or `several`; `number`: an integer, or the bytes of a float. */
struct value {
  uint32_t kind;
  uint32_t ref;
  int64_t number;
};

/* ASCII.  `field`, `canon`: what it was found to be; see columns.c. */
struct text {
  const uint8_t *at;
  uint32_t length;
  int32_t field;
  int32_t canon;
};

/* A list, tuple or dict (keys and values in turn): places in `items`, with room for more. */
struct several {
  size_t at;
  uint32_t n, room;
};

/* A text that entries hold: the first of those that are alike, its numbers + 1 (0: none). */
struct canon {
  uint32_t text, slot;
  uint32_t name, type;
};

/* Canons of a name and a description, and an id: an integer, or a text whose canon is `ref`. */
struct group {
  struct value id;
  uint32_t name, desc;
};

/* What was called: places among names and types, elements of all tensors, -1: there are none. */
struct call {
  int64_t name, type, inputs, outputs;
};

struct array {
  void *at;
  size_t room; /* elements */
};

/* Memory is kept from one dump to the next: that of a new one costs more than reading it. */
struct reader {
  const uint8_t *data;
  size_t length;
  size_t bytes; /* of all arrays */
  uint64_t work; /* steps that are left, so that values that are shared cost no more than others */
  struct array stack, marks, memo, items, several, texts;
  size_t depth, fence, n_marks, memo_end, memo_n, n_items, n_several, n_texts;
  struct value result;

  struct array canons, slots; /* slots: canon + 1, by hash; 0: free */
  size_t n_canons;
  struct array names, types, groups; /* in order of coming */
  size_t n_names, n_types, n_groups;
  struct array calls, call_slots; /* calls that differ; slots as above */
  size_t n_calls;
  uint32_t call_mask;
  int begun; /* whether any entry says so */
  struct value empty; /* a text */

  struct array rest; /* bytes */
  size_t n_rest;
};

static inline struct value *values(const struct array *a) { return a->at; }
static inline struct text *texts(const struct reader *r) { return r->texts.at; }
static inline struct several *several(const struct reader *r, struct value v) {
  return (struct several *)r->several.at + v.ref;
}
static inline struct value *items(const struct reader *r, struct value v) {
  return values(&r->items) + several(r, v)->at;
}

/* Room for `n` elements of `each` bytes; 0: there is no memory, or a dump needs less. */
int make_room(struct reader *r, struct array *a, size_t n, size_t each);

/* Reads a pickle of plain values to `result`; 0: something else is in it. */
int read_pickle(struct reader *r);

/* Whether a text is this one. */
int is(const struct text *t, const char *name);

/* The entries of what was read: a list; NULL: there is none. */
const struct value *entries_of(const struct reader *r);

/* Entries to columns of `n` rows; 0: an entry is not as the newest dumps have them. */
int read_entries(struct reader *r, int64_t *wide, int32_t *narrow, uint8_t *is_p2p, size_t n);

/* Writes what is not in the columns as a pickle to `rest`; 0: it is too much, or too deep. */
int write_rest(struct reader *r);

#endif
