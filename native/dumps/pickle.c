/* A pickle of plain values: what PyTorch's flight recorder writes.
 *
 * Taken here are integers of 64 bits, floats, ASCII text, None, booleans, lists, tuples,
 * and dicts by text.  Anything else, good or bad, is left to the reader in Python, of
 * which this is a short cut and never a rival: what is taken here means the same there.
 *
 * Input is hostile.  No byte is read that was not asked for, nothing recurs, and memory
 * and steps are bounded by the length.
 */
#include <stdlib.h>
#include <string.h>

#include "values.h"

/* What arrays may take beside so many bytes for each that is read. */
#define BYTES_LEAST (8 << 20)
#define BYTES_EACH 48

#define RARELY(x) __builtin_expect(!!(x), 0)

int make_room(struct reader *r, struct array *a, size_t n, size_t each) {
  if (n <= a->room) return 1;
  size_t room = a->room * 2 > n ? a->room * 2 : n;
  if (room < 256) room = 256;
  size_t bytes = r->bytes + (room - a->room) * each;
  if (bytes > BYTES_LEAST + r->length * BYTES_EACH) return 0;
  void *at = realloc(a->at, room * each);
  if (at == NULL) return 0;
  r->bytes = bytes;
  a->at = at;
  a->room = room;
  return 1;
}

static uint64_t little(const uint8_t *p, size_t bytes) {
  uint64_t x = 0;
  for (size_t i = bytes; i-- > 0;) x = x << 8 | p[i];
  return x;
}

static int is_ascii(const uint8_t *p, size_t length) {
  uint8_t all = 0;
  for (size_t i = 0; i < length; i++) all |= p[i];
  return all < 0x80;
}

static inline int push(struct reader *r, enum kind kind, uint32_t ref, int64_t number) {
  if (RARELY(r->depth == r->stack.room) &&
      !make_room(r, &r->stack, r->depth + 1, sizeof(struct value)))
    return 0;
  values(&r->stack)[r->depth++] = (struct value){kind, ref, number};
  return 1;
}

static int push_text(struct reader *r, const uint8_t *at, size_t length) {
  if (!is_ascii(at, length) || !make_room(r, &r->texts, r->n_texts + 1, sizeof(struct text))) return 0;
  texts(r)[r->n_texts] = (struct text){at, (uint32_t)length, -1, -1};
  return push(r, TEXT, (uint32_t)r->n_texts++, 0);
}

/* An empty list, tuple or dict on the stack. */
static int push_several(struct reader *r, enum kind kind) {
  if (!make_room(r, &r->several, r->n_several + 1, sizeof(struct several))) return 0;
  ((struct several *)r->several.at)[r->n_several] = (struct several){0, 0, 0};
  return push(r, kind, (uint32_t)r->n_several++, 0);
}

/* Adds `n` values, which lie on the stack, to a list or dict, or to a new tuple. */
static int extend(struct reader *r, struct value to, size_t from, size_t n) {
  struct several *s = several(r, to);
  if (n == 0) return 1;
  size_t most = s->n + n;
  if (most > UINT32_MAX) return 0;
  if (most > s->room) {
    /* What came last grows where it is, anything else moves to the end: with more room
     * than it needs where it had some already, as it may grow again. */
    int last = s->n > 0 && s->at + s->room == r->n_items;
    size_t room = s->n == 0 || last ? most : 2 * most;
    if (room > UINT32_MAX) return 0;
    size_t at = last ? s->at : r->n_items;
    if (!make_room(r, &r->items, at + room, sizeof(struct value))) return 0;
    if (!last && s->n > 0)
      memcpy(values(&r->items) + at, values(&r->items) + s->at, s->n * sizeof(struct value));
    s->at = at;
    s->room = (uint32_t)room;
    r->n_items = at + room;
  }
  memcpy(values(&r->items) + s->at + s->n, values(&r->stack) + from, n * sizeof(struct value));
  s->n = (uint32_t)most;
  return 1;
}

/* Empty places in the memo before a new one; more than there are bytes: for nobody. */
static int lengthen_memo(struct reader *r, size_t index) {
  if (index > r->length || !make_room(r, &r->memo, index + 1, sizeof(struct value))) return 0;
  memset(values(&r->memo) + r->memo_end, 0, (index - r->memo_end) * sizeof(struct value));
  r->memo_end = index;
  return 1;
}

static inline int put(struct reader *r, size_t index) {
  if (r->depth <= r->fence) return 0;
  if (index >= r->memo_end) {
    if ((index > r->memo_end || index >= r->memo.room) && !lengthen_memo(r, index)) return 0;
    r->memo_end++;
    r->memo_n++;
  } else {
    r->memo_n += values(&r->memo)[index].kind == ABSENT;
  }
  values(&r->memo)[index] = values(&r->stack)[r->depth - 1];
  return 1;
}

static inline int get(struct reader *r, size_t index) {
  if (index >= r->memo_end) return 0;
  struct value v = values(&r->memo)[index];
  return v.kind != ABSENT && push(r, v.kind, v.ref, v.number);
}

static int mark(struct reader *r) {
  if (!make_room(r, &r->marks, r->n_marks + 1, sizeof(size_t))) return 0;
  ((size_t *)r->marks.at)[r->n_marks++] = r->fence;
  r->fence = r->depth;
  return 1;
}

/* Takes the newest mark away: to where it was set; 0: there is none. */
static int unmark(struct reader *r, size_t *from) {
  if (r->n_marks == 0) return 0;
  *from = r->fence;
  r->fence = ((size_t *)r->marks.at)[--r->n_marks];
  return 1;
}

/* What lies on the stack from `from` on goes into the list or dict before it. */
static int put_into(struct reader *r, enum kind kind, size_t from) {
  if (from <= r->fence || from > r->depth) return 0;
  size_t n = r->depth - from;
  const struct value *v = values(&r->stack) + from;
  if (v[-1].kind != kind) return 0;
  if (kind == DICT) {
    if (n % 2 != 0) return 0;
    for (size_t i = 0; i < n; i += 2)
      if (v[i].kind != TEXT) return 0;
  }
  r->depth = from;
  return extend(r, v[-1], from, n);
}

/* What lies on the stack from `from` on becomes a tuple. */
static int make_tuple(struct reader *r, size_t from) {
  if (from < r->fence || from > r->depth) return 0;
  size_t n = r->depth - from;
  if (!push_several(r, TUPLE)) return 0;
  struct value tuple = values(&r->stack)[r->depth - 1];
  if (!extend(r, tuple, from, n)) return 0;
  values(&r->stack)[from] = tuple;
  r->depth = from + 1;
  return 1;
}

int read_pickle(struct reader *r) {
  const uint8_t *p = r->data, *end = p + r->length;
  r->depth = r->fence = r->n_marks = r->memo_end = r->memo_n = 0;
  r->n_items = r->n_several = r->n_texts = 0;
  if (r->length >= UINT32_MAX) return 0;
#define NEED(n) \
  if ((size_t)(end - p) < (size_t)(n)) return 0
#define TRY(x) \
  if (!(x)) return 0
  while (p < end) {
    size_t n, from;
    switch (*p++) {
      case 0x80: /* PROTO */
        NEED(1);
        if (*p < 2 || *p > 5) return 0;
        p++;
        break;
      case 0x95: /* FRAME */
        NEED(8);
        if (little(p, 8) > (uint64_t)(end - p - 8)) return 0;
        p += 8;
        break;
      case '.':
        if (r->depth != 1 || r->n_marks != 0) return 0;
        r->result = values(&r->stack)[0];
        return 1;
      case '(':
        TRY(mark(r));
        break;
      case 'h': /* BINGET */
        NEED(1);
        TRY(get(r, *p));
        p++;
        break;
      case 'j': /* LONG_BINGET */
        NEED(4);
        TRY(get(r, little(p, 4)));
        p += 4;
        break;
      case 'q': /* BINPUT */
        NEED(1);
        TRY(put(r, *p));
        p++;
        break;
      case 'r': /* LONG_BINPUT */
        NEED(4);
        TRY(put(r, little(p, 4)));
        p += 4;
        break;
      case 0x94: /* MEMOIZE */
        TRY(put(r, r->memo_n));
        break;
      case 'K': /* BININT1 */
        NEED(1);
        TRY(push(r, INTEGER, 0, *p));
        p++;
        break;
      case 'M': /* BININT2 */
        NEED(2);
        TRY(push(r, INTEGER, 0, (int64_t)little(p, 2)));
        p += 2;
        break;
      case 'J': /* BININT */
        NEED(4);
        TRY(push(r, INTEGER, 0, (int32_t)little(p, 4)));
        p += 4;
        break;
      case 0x8a: /* LONG1 */
        NEED(1);
        n = *p++;
        NEED(n);
        if (n > 8) return 0;
        uint64_t x = little(p, n);
        if (n > 0 && n < 8 && p[n - 1] >= 0x80) x |= ~(uint64_t)0 << 8 * n;
        TRY(push(r, INTEGER, 0, (int64_t)x));
        p += n;
        break;
      case 'G': /* BINFLOAT */
        NEED(8);
        TRY(push(r, FLOAT, 0, (int64_t)little(p, 8)));
        p += 8;
        break;
      case 'X': /* BINUNICODE */
        NEED(4);
        n = little(p, 4);
        p += 4;
        NEED(n);
        TRY(push_text(r, p, n));
        p += n;
        break;
      case 0x8c: /* SHORT_BINUNICODE */
        NEED(1);
        n = *p++;
        NEED(n);
        TRY(push_text(r, p, n));
        p += n;
        break;
      case 'N':
        TRY(push(r, NONE, 0, 0));
        break;
      case 0x88: /* NEWTRUE */
        TRY(push(r, YES, 0, 0));
        break;
      case 0x89: /* NEWFALSE */
        TRY(push(r, NO, 0, 0));
        break;
      case ']':
        TRY(push_several(r, LIST));
        break;
      case '}':
        TRY(push_several(r, DICT));
        break;
      case ')':
        TRY(push_several(r, TUPLE));
        break;
      case 0x85: /* TUPLE1 */
      case 0x86:
      case 0x87:
        n = (size_t)(p[-1] - 0x84);
        if (r->depth < n) return 0;
        TRY(make_tuple(r, r->depth - n));
        break;
      case 't': /* TUPLE */
        TRY(unmark(r, &from) && make_tuple(r, from));
        break;
      case 'a': /* APPEND */
        TRY(r->depth > 0 && put_into(r, LIST, r->depth - 1));
        break;
      case 'e': /* APPENDS */
        TRY(unmark(r, &from) && put_into(r, LIST, from));
        break;
      case 's': /* SETITEM */
        TRY(r->depth > 1 && put_into(r, DICT, r->depth - 2));
        break;
      case 'u': /* SETITEMS */
        TRY(unmark(r, &from) && put_into(r, DICT, from));
        break;
      default:
        return 0;
    }
  }
  return 0;
}
