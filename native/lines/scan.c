/* Finished calls of a trace to columns: the analyzer's hot path.
 *
 * One pass over whole lines.  Taken here is only what the collectors write: a
 * `call` line without white space, escapes, fractions or nesting, of fields that
 * are known, each once and of the type that it should have.  Every other line, good
 * or bad, is left to the Python reader, of which this is a short cut and never a
 * rival: what is taken here means the same there.
 *
 * Input is hostile.  Nothing is read beyond a line's newline, which no rule of
 * the grammar below takes, so that it ends every loop.
 */
#include <stdint.h>
#include <string.h>

#include "tables.h"

/* Columns, as in nccluprobe/trace/scanner.py.  SIG: a signature + 1; 0: the function has none. */
enum {
  T, DUR, RC, THREAD, GROUP, GDEPTH, COMM, IDX, ORD, STREAM, SEQ, PEER, CODE, SIG, COLUMNS
};
/* Of a line that is left to the reader: where it is, its number, calls before it. */
enum { START, END, LINE, BEFORE, REST_COLUMNS };
/* Of the counts of a scan, where those by field begin. */
enum { FIELDS = 4 };

/* What a function's line must have beside what all have. */
enum { NUMBERED = 1, HAS_COUNT = 2, HAS_DATATYPE = 4, HAS_OP = 8, HAS_ROOT = 16, HAS_PEER = 32 };

/* Fields that were there. */
enum {
  F_API = 1 << 0, F_T = 1 << 1, F_THREAD = 1 << 2, F_DUR = 1 << 3, F_RC = 1 << 4,
  F_COMM = 1 << 5, F_IDX = 1 << 6, F_ORD = 1 << 7, F_COUNT = 1 << 8, F_DATATYPE = 1 << 9,
  F_OP = 1 << 10, F_ROOT = 1 << 11, F_PEER = 1 << 12, F_STREAM = 1 << 13, F_SEQ = 1 << 14,
  F_GROUP = 1 << 15, F_GDEPTH = 1 << 16, F_END = 1 << 17,
};
#define F_ALWAYS (F_API | F_T | F_THREAD | F_DUR | F_RC)

#define TIME_LIMIT ((int64_t)1 << 62)
#define SUCCESS 0
#define IN_PROGRESS 7

struct call {
  uint32_t have;
  int64_t value[COLUMNS];
  int64_t count, root;
  int64_t captured; /* `"capture":"yes"` */
  uint64_t others;  /* fields that are no column */
  struct text api, datatype, op;
};

/* The text behind an opening quote; NULL: it is not plain. */
static const char *take_text(const char *p, struct text *out) {
  const char *start = p;
  while (*p != '"') {
    if ((uint8_t)*p < 0x20 || (uint8_t)*p >= 0x7f || *p == '\\') return NULL;
    p++;
  }
  out->at = start;
  out->length = (uint32_t)(p - start);
  return p + 1;
}

/* An integer of up to 18 digits, as JSON writes it; NULL: something else. */
static const char *take_integer(const char *p, int64_t *out) {
  int negative = *p == '-';
  p += negative;
  const char *start = p;
  int64_t value = 0;
  while ((uint8_t)(*p - '0') <= 9) {
    if (p - start == 18) return NULL;
    value = value * 10 + (*p - '0');
    p++;
  }
  if (p == start || (*start == '0' && (p - start > 1 || negative))) return NULL;
  *out = negative ? -value : value;
  return p;
}

static const char *take_word(const char *p, const char *word) {
  for (; *word != 0; word++, p++)
    if (*p != *word) return NULL;
  return p;
}

static int is(struct text key, const char *name) {
  return memcmp(key.at, name, key.length) == 0;
}

/* Which field a key is, and its column; 0: one that nobody asks for; -1: not for here. */
static int field_of(struct text key, int *column) {
#define FIELD(name, flag, where) \
  if (is(key, name)) {           \
    *column = where;             \
    return flag;                 \
  }
  *column = -1;
  switch (key.length) {
    case 1:
      FIELD("t", F_T, T)
      break;
    case 2:
      FIELD("rc", F_RC, RC)
      FIELD("op", F_OP, -1)
      break;
    case 3:
      FIELD("api", F_API, -1)
      FIELD("dur", F_DUR, DUR)
      FIELD("idx", F_IDX, IDX)
      FIELD("ord", F_ORD, ORD)
      FIELD("seq", F_SEQ, SEQ)
      FIELD("end", F_END, -1)
      break;
    case 4:
      FIELD("comm", F_COMM, COMM)
      FIELD("root", F_ROOT, -1)
      FIELD("peer", F_PEER, PEER)
      if (is(key, "kind") || is(key, "site")) return -1;
      break;
    case 5:
      FIELD("count", F_COUNT, -1)
      FIELD("group", F_GROUP, GROUP)
      break;
    case 6:
      FIELD("thread", F_THREAD, THREAD)
      FIELD("stream", F_STREAM, STREAM)
      FIELD("gdepth", F_GDEPTH, GDEPTH)
      break;
    case 8:
      FIELD("datatype", F_DATATYPE, -1)
      break;
  }
  return 0;
#undef FIELD
}

/* The value of a field that is known; NULL: not as it should be. */
static const char *take_known(const char *p, int field, int column, struct call *c) {
  struct text text;
  if (field & (F_API | F_DATATYPE | F_OP | F_END)) {
    if (*p != '"' || (p = take_text(p + 1, &text)) == NULL) return NULL;
    if (field == F_API) c->api = text;
    if (field == F_DATATYPE) c->datatype = text;
    if (field == F_OP) c->op = text;
    /* Any other end says more of the call than its columns. */
    if (field == F_END && !(text.length == 10 && is(text, "enter_only"))) return NULL;
    return p;
  }
  if (*p == 'n') {
    if (!(field & (F_DUR | F_RC | F_STREAM))) return NULL;
    c->value[column] = -1;
    return take_word(p, "null");
  }
  int64_t *to = field == F_COUNT ? &c->count : field == F_ROOT ? &c->root : &c->value[column];
  return take_integer(p, to);
}

/* The value of a field that is no column; NULL: it is not plain. */
static const char *skip_value(const char *p, struct text key, struct call *c) {
  struct text text;
  int64_t number;
  switch (*p) {
    case '"':
      if ((p = take_text(p + 1, &text)) == NULL) return NULL;
      if (key.length == 7 && is(key, "capture") && text.length == 3 && is(text, "yes"))
        c->captured++;
      return p;
    case 'n':
      return take_word(p, "null");
    case 't':
      return take_word(p, "true");
    case 'f':
      return take_word(p, "false");
    default:
      return take_integer(p, &number);
  }
}

/* The fields of a line behind its kind, up to its newline; NULL: not for here. */
static const char *take_fields(const struct scanner *s, const char *p, struct call *c) {
  for (;;) {
    struct text key;
    int column;
    if (*p != '"' || (p = take_text(p + 1, &key)) == NULL || *p != ':') return NULL;
    p++;
    int field = field_of(key, &column);
    if (field < 0 || ((uint32_t)field & c->have)) return NULL;
    if (field == 0) {
      uint64_t other = find_field(s, key);
      if (other == 0 || (other & c->others)) return NULL;
      c->others |= other;
    }
    c->have |= (uint32_t)field;
    p = field ? take_known(p, field, column, c) : skip_value(p, key, c);
    if (p == NULL) return NULL;
    if (*p == '}') return p[1] == '\n' ? p + 1 : NULL;
    if (*p != ',') return NULL;
    p++;
  }
}

/* Whether a call has what it needs, within bounds; its code and signature. */
static int finish(struct scanner *s, struct call *c) {
  if ((c->have & F_ALWAYS) != F_ALWAYS) return 0;
  int64_t *v = c->value;
  if (v[T] < 0 || v[T] >= TIME_LIMIT || v[DUR] >= TIME_LIMIT || v[DUR] < -1) return 0;
  if (v[RC] != SUCCESS && v[RC] != IN_PROGRESS && v[RC] != -1) return 0;
  const struct api *api = find_api(s, c->api);
  if (api == NULL) return 0;
  v[CODE] = api->code;
  uint32_t needs = api->needs;
  if (!(needs & NUMBERED)) {
    /* Its numbers, if it has any, are nobody's business. */
    v[COMM] = v[IDX] = v[ORD] = v[PEER] = -1;
    return 1;
  }
  uint32_t must = F_COMM | F_IDX | F_ORD;
  struct signature x = {0, 0, api->code, -1, -1};
  if (needs & HAS_COUNT) must |= F_COUNT, x.count = c->count;
  if (needs & HAS_ROOT) must |= F_ROOT, x.root = c->root;
  if (needs & HAS_DATATYPE) must |= F_DATATYPE;
  if (needs & HAS_OP) must |= F_OP;
  if (needs & HAS_PEER) must |= F_PEER;
  if ((c->have & must) != must) return 0;
  if (needs & HAS_PEER) {
    if (v[PEER] > s->max_peer || v[PEER] < -s->max_peer) return 0;
  } else {
    v[PEER] = -1;
  }
  if ((needs & HAS_DATATYPE) && (x.datatype = find_string(s, c->datatype)) < 0) return 0;
  if ((needs & HAS_OP) && (x.op = find_string(s, c->op)) < 0) return 0;
  v[SIG] = find_signature(s, &x) + 1;
  return v[SIG] > 0;
}

/* Reads `length` bytes of whole lines.
 *
 * `columns`: COLUMNS columns of `most` rows; `rest`: REST_COLUMNS columns of
 * `most_rest` rows, at least one per line.  counts[] = lines, calls, rest,
 * calls that were captured into a CUDA graph, then by field the calls that have it,
 * of the fields that are counted.
 */
EXPORT void ncp_lines_scan(struct scanner *s, const char *data, int64_t length, int64_t *columns,
                           int64_t most, int64_t *rest, int64_t most_rest, int64_t *counts) {
  static const char HEAD[] = "{\"kind\":\"call\",";
  const size_t head = sizeof HEAD - 1;
  const char *p = data, *limit = data + length;
  int64_t lines = 0, calls = 0, others = 0, captured = 0;
  memset(counts + FIELDS, 0, MAX_FIELDS * sizeof *counts);
  while (p < limit) {
    const char *end = NULL;
    if (calls < most && (size_t)(limit - p) > head && memcmp(p, HEAD, head) == 0 &&
        limit[-1] == '\n') {
      struct call c;
      memset(&c, 0, sizeof c);
      c.value[GDEPTH] = 1;
      c.value[STREAM] = c.value[SEQ] = -1;
      end = take_fields(s, p + head, &c);
      if (end != NULL && finish(s, &c)) {
        for (int i = 0; i < COLUMNS; i++) columns[i * most + calls] = c.value[i];
        captured += c.captured;
        for (uint64_t x = c.others & s->counted; x != 0; x &= x - 1)
          counts[FIELDS + __builtin_ctzll(x)]++;
        calls++;
        lines++;
        p = end + 1;
        continue;
      }
    }
    end = memchr(p, '\n', (size_t)(limit - p));
    if (end == NULL || others == most_rest) break;
    rest[START * most_rest + others] = p - data;
    rest[END * most_rest + others] = end - data;
    rest[LINE * most_rest + others] = lines++;
    rest[BEFORE * most_rest + others] = calls;
    others++;
    p = end + 1;
  }
  counts[0] = lines;
  counts[1] = calls;
  counts[2] = others;
  counts[3] = captured;
}

/* How many lines there are. */
EXPORT int64_t ncp_lines_count(const char *data, int64_t length) {
  int64_t n = 0;
  for (int64_t i = 0; i < length; i++) n += data[i] == '\n';
  return n;
}
