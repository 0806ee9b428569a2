/* What Python calls: a reader that is kept, and one dump after another. */
#include <stdlib.h>

#include "values.h"

/* No entry is shorter, unless entries are one and the same. */
#define BYTES_OF_ENTRY 32

static void release(struct reader *r) {
  struct array *all[] = {&r->stack,  &r->marks, &r->memo,  &r->items,  &r->several, &r->texts,
                         &r->canons, &r->slots, &r->names, &r->types, &r->groups,  &r->rest,
                         &r->calls,  &r->call_slots};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->at);
  *r = (struct reader){0};
}

EXPORT struct reader *ncp_dumps_new(void) { return calloc(1, sizeof(struct reader)); }

EXPORT void ncp_dumps_free(struct reader *r) {
  release(r);
  free(r);
}

/* Reads a pickle, whose bytes stay there until the next call; how many entries it has.
 * -1: it is not for here, and the memory is given back for who reads it instead. */
EXPORT int64_t ncp_dumps_read(struct reader *r, const uint8_t *data, int64_t length) {
  r->data = data;
  r->length = (size_t)length;
  const struct value *entries = read_pickle(r) ? entries_of(r) : NULL;
  if (entries != NULL && several(r, *entries)->n <= r->length / BYTES_OF_ENTRY)
    return several(r, *entries)->n;
  release(r);
  return -1;
}

/* Its entries to columns of `n` rows; bytes of what else there is to tell; -1 as above. */
EXPORT int64_t ncp_dumps_columns(struct reader *r, int64_t *wide, int32_t *narrow, uint8_t *is_p2p,
                                 int64_t n) {
  if (read_entries(r, wide, narrow, is_p2p, (size_t)n) && write_rest(r))
    return (int64_t)r->n_rest;
  release(r);
  return -1;
}

/* These bytes: a pickle. */
EXPORT const void *ncp_dumps_rest(const struct reader *r) { return r->rest.at; }
