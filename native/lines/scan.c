/* Finished calls of a trace to columns: the analyzer's hot path.
 *
 * One pass over whole lines.  Taken here is only what the collectors write: a
 * `call` line without white space, escapes, fractions or nesting, of fields that
 * are known, each once and of the type that it should have.  Every other line, good or bad, is
 * left to the Python reader, of which this is a short cut and never a rival: what
 * is taken here means the same there.
 *
 * Input is hostile.  Nothing is read beyond a line's newline, which no rule of
 * the grammar below takes, so that it ends every loop.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

struct call {
  uint32_t have;
  int64_t value[COLUMNS];
  int64_t count, root;
  int64_t captured; /* `"capture":"yes"` */
  uint64_t others;  /* fields that are no column */
  struct text api, datatype, op;
};

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

/* The bit of a field; 0: nobody has told of it. */
static uint64_t find_field(const struct scanner *s, struct text name) {
  for (uint32_t i = 0; i < s->n_fields; i++)
    if (s->field_lengths[i] == name.length && memcmp(s->fields[i], name.at, name.length) == 0)
      return (uint64_t)1 << i;
  return 0;
}

static const struct api *find_api(const struct scanner *s, struct text name) {
  uint32_t at = hash_bytes(name.at, name.length) % API_SLOTS;
  for (; s->apis[at].length != 0; at = (at + 1) % API_SLOTS)
    if (s->apis[at].length == name.length && memcmp(s->apis[at].name, name.at, name.length) == 0)
      return &s->apis[at];
  return NULL;
}

/* Number of a datatype or a reduction; -1: no room for one more. */
static int32_t find_string(struct scanner *s, struct text x) {
  for (uint32_t i = 0; i < s->n_strings; i++)
    if (s->lengths[i] == x.length && memcmp(s->strings[i], x.at, x.length) == 0)
      return (int32_t)i;
  if (s->n_strings == MAX_STRINGS || x.length > MAX_STRING) return -1;
  memcpy(s->strings[s->n_strings], x.at, x.length);
  s->lengths[s->n_strings] = x.length;
  return (int32_t)s->n_strings++;
}

/* Number of a signature; -1: no room for one more. */
static int32_t find_signature(struct scanner *s, const struct signature *x) {
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
