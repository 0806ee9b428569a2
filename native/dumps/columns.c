/* Entries of a flight recorder dump to columns.
 *
 * Only what the newest versions write is taken: an entry has all fields, each of the
 * type that it should have.
 */
#include <string.h>

#include "values.h"

/* Columns of 64 and of 32 bits, as in nccluprobe/importers/fr_native.py. */
enum { RECORD, SEQ, P2P_SEQ, OP, CREATED, ENDED, TIMEOUT, WIDE };
enum { GROUP, CALL, STATE, NARROW };

struct row {
  int64_t wide[WIDE];
  int32_t narrow[NARROW];
  uint8_t is_p2p;
};

/* Fields, each of which an entry must have. */
enum {
  RECORD_ID, COLLECTIVE_SEQ_ID, P2P_SEQ_ID, OP_ID, IS_P2P, PG_ID, PROCESS_GROUP, PROFILING_NAME,
  INPUT_DTYPES, OUTPUT_DTYPES, INPUT_SIZES, OUTPUT_SIZES, STATE_OF, TIME_CREATED, TIME_STARTED,
  TIME_COMPLETED, TIMEOUT_MS, FIELDS, OTHER = FIELDS
};

static const char *const FIELD_NAMES[FIELDS] = {
    "record_id",       "collective_seq_id", "p2p_seq_id",
    "op_id",           "is_p2p",            "pg_id",
    "process_group",   "profiling_name",    "input_dtypes",
    "output_dtypes",   "input_sizes",       "output_sizes",
    "state",           "time_created_ns",   "time_discovered_started_ns",
    "time_discovered_completed_ns",         "timeout_ms",
};

/* Every number is smaller. */
#define BIG ((int64_t)1 << 62)
/* More groups than this, or different texts, are left to Python. */
#define MAX_GROUPS 1024
#define MAX_CANONS (1 << 15)
#define SLOTS (2 * MAX_CANONS)
/* Steps for a dump, and for each of its bytes. */
#define WORK_LEAST (1 << 20)
#define WORK_EACH 16

int is(const struct text *t, const char *name) {
  return strlen(name) == t->length && memcmp(t->at, name, t->length) == 0;
}

static int field_of(struct text *t) {
  if (t->field < 0) {
    t->field = OTHER;
    for (int i = 0; i < FIELDS; i++)
      if (is(t, FIELD_NAMES[i])) t->field = i;
  }
  return t->field;
}

static uint32_t hash_of(const struct text *t) {
  uint32_t h = 2166136261u;
  for (uint32_t i = 0; i < t->length; i++) h = (h ^ t->at[i]) * 16777619u;
  return h ^ h >> 15;
}

/* Takes steps of what is left; 0: there are none. */
static int spend(struct reader *r, uint64_t steps) {
  if (r->work < steps) return 0;
  r->work -= steps;
  return 1;
}

/* The canon of a text; -1: there are too many. */
static int32_t canon_of(struct reader *r, struct value v) {
  struct text *t = texts(r) + v.ref;
  if (t->canon >= 0) return t->canon;
  uint32_t *slots = r->slots.at, at = hash_of(t) % SLOTS;
  struct canon *canons = r->canons.at;
  for (; slots[at] != 0; at = (at + 1) % SLOTS) {
    if (!spend(r, 1)) return -1;
    const struct text *x = texts(r) + canons[slots[at] - 1].text;
    if (x->length == t->length && memcmp(x->at, t->at, t->length) == 0)
      return t->canon = (int32_t)slots[at] - 1;
  }
  if (r->n_canons == MAX_CANONS) return -1;
  canons[r->n_canons] = (struct canon){v.ref, at, 0, 0};
  slots[at] = (uint32_t)++r->n_canons;
  return t->canon = (int32_t)slots[at] - 1;
}

/* The number of a text among names or types; -1: it is no text, or there are too many. */
static int64_t number_of(struct reader *r, struct value v, int is_type) {
  int32_t at = v.kind == TEXT ? canon_of(r, v) : -1;
  if (at < 0) return -1;
  struct canon *c = (struct canon *)r->canons.at + at;
  uint32_t *number = is_type ? &c->type : &c->name;
  if (*number == 0) {
    struct array *list = is_type ? &r->types : &r->names;
    size_t *n = is_type ? &r->n_types : &r->n_names;
    if (!make_room(r, list, *n + 1, sizeof v)) return -1;
    values(list)[*n] = v;
    *number = (uint32_t)++*n;
  }
  return *number - 1;
}

static int32_t group_of(struct reader *r, struct value id, struct value pg) {
  if ((pg.kind != TUPLE && pg.kind != LIST) || several(r, pg)->n != 2) return -1;
  const struct value *told = items(r, pg);
  if (told[0].kind != TEXT || told[1].kind != TEXT) return -1;
  if (id.kind != TEXT && id.kind != INTEGER) return -1;
  int32_t name = canon_of(r, told[0]), desc = canon_of(r, told[1]);
  int32_t text = id.kind == TEXT ? canon_of(r, id) : 0;
  if (name < 0 || desc < 0 || text < 0) return -1;
  struct group x = {{id.kind, (uint32_t)text, id.number}, (uint32_t)name, (uint32_t)desc};
  struct group *groups = r->groups.at;
  if (!spend(r, r->n_groups)) return -1;
  for (size_t i = 0; i < r->n_groups; i++)
    if (groups[i].id.number == x.id.number && groups[i].name == x.name &&
        groups[i].desc == x.desc && groups[i].id.kind == x.id.kind && groups[i].id.ref == x.id.ref)
      return (int32_t)i;
  if (r->n_groups == MAX_GROUPS) return -1;
  groups[r->n_groups] = x;
  return (int32_t)r->n_groups++;
}

static int is_list(struct value v) { return v.kind == LIST || v.kind == TUPLE; }

/* Elements of all tensors, -1 when there are none; -2: they are not as they should be. */
static int64_t elements_of(struct reader *r, struct value shapes) {
  if (!is_list(shapes)) return -2;
  uint32_t n = several(r, shapes)->n;
  int64_t total = n ? 0 : -1;
  if (!spend(r, n)) return -2;
  const struct value *shape = items(r, shapes);
  for (uint32_t i = 0; i < n; i++) {
    if (!is_list(shape[i])) return -2;
    const struct value *size = items(r, shape[i]);
    uint32_t k = several(r, shape[i])->n;
    if (!spend(r, k)) return -2;
    int64_t product = 1;
    for (; k > 0; k--, size++) {
      if (size->kind != INTEGER || size->number < 0) return -2;
      if (__builtin_mul_overflow(product, size->number, &product)) return -2;
    }
    if (__builtin_add_overflow(total, product, &total)) return -2;
  }
  return total < BIG - 1 ? total : -2;
}

/* The datatype of the first tensor, of the inputs or else of the outputs; an empty text: none. */
static int64_t type_of(struct reader *r, struct value in, struct value out) {
  if (!is_list(in) || !is_list(out)) return -1;
  if (several(r, in)->n > 0) return number_of(r, items(r, in)[0], 1);
  if (several(r, out)->n > 0) return number_of(r, items(r, out)[0], 1);
  return number_of(r, r->empty, 1);
}

static uint64_t mix(uint64_t h, uint64_t x) {
  h = (h ^ x) * 0x9E3779B97F4A7C15u;
  return h ^ (h >> 29);
}

/* The number of a call among those of the dump; -1: it is not as it should be. */
static int32_t call_of(struct reader *r, const struct value *f) {
  struct call x;
  x.name = number_of(r, f[PROFILING_NAME], 0);
  x.type = type_of(r, f[INPUT_DTYPES], f[OUTPUT_DTYPES]);
  x.inputs = elements_of(r, f[INPUT_SIZES]);
  x.outputs = elements_of(r, f[OUTPUT_SIZES]);
  if (x.name < 0 || x.type < 0 || x.inputs < -1 || x.outputs < -1) return -1;
  uint64_t h = mix((uint64_t)x.name << 32 | (uint64_t)x.type, (uint64_t)x.inputs);
  uint32_t *slots = r->call_slots.at, at = (uint32_t)(mix(h, (uint64_t)x.outputs) >> 3);
  struct call *calls = r->calls.at;
  for (at &= r->call_mask; slots[at] != 0; at = (at + 1) & r->call_mask) {
    if (!spend(r, 1)) return -1;
    const struct call *y = calls + slots[at] - 1;
    if (y->name == x.name && y->type == x.type && y->inputs == x.inputs && y->outputs == x.outputs)
      return (int32_t)slots[at] - 1;
  }
  calls[r->n_calls] = x;
  slots[at] = (uint32_t)++r->n_calls;
  return (int32_t)slots[at] - 1;
}

static int take_integer(struct value v, int64_t least, int64_t *to) {
  *to = v.number;
  return v.kind == INTEGER && v.number >= least && v.number < BIG;
}

/* A time, 0 when it is not known. */
static int take_time(struct value v, int64_t least, int64_t *to) {
  *to = 0;
  return v.kind == NONE || take_integer(v, least, to);
}

static int take_state(const struct reader *r, struct value v, int32_t *to) {
  *to = 0;
  if (v.kind == NONE) return 1;
  if (v.kind != TEXT) return 0;
  const struct text *t = texts(r) + v.ref;
  if (is(t, "completed")) *to = 2;
  if (is(t, "started")) *to = 1;
  return 1;
}

static int take_entry(struct reader *r, struct value entry, struct row *row) {
  if (entry.kind != DICT || !spend(r, several(r, entry)->n)) return 0;
  struct value f[FIELDS + 1];
  memset(f, 0, sizeof f);
  const struct value *v = items(r, entry);
  for (uint32_t n = several(r, entry)->n; n > 0; n -= 2, v += 2)
    f[field_of(texts(r) + v->ref)] = v[1];
  if (f[IS_P2P].kind != YES && f[IS_P2P].kind != NO) return 0;
  row->is_p2p = f[IS_P2P].kind == YES;
  row->narrow[GROUP] = group_of(r, f[PG_ID], f[PROCESS_GROUP]);
  row->narrow[CALL] = call_of(r, f);
  int64_t begun;
  if (row->narrow[GROUP] < 0 || row->narrow[CALL] < 0 ||
      !take_state(r, f[STATE_OF], &row->narrow[STATE]) ||
      !take_integer(f[RECORD_ID], 1 - BIG, &row->wide[RECORD]) ||
      !take_integer(f[COLLECTIVE_SEQ_ID], 1 - BIG, &row->wide[SEQ]) ||
      !take_integer(f[P2P_SEQ_ID], 1 - BIG, &row->wide[P2P_SEQ]) ||
      !take_integer(f[OP_ID], 1 - BIG, &row->wide[OP]) ||
      !take_time(f[TIME_CREATED], 1 - BIG, &row->wide[CREATED]) ||
      !take_time(f[TIME_STARTED], 1 - BIG, &begun) ||
      !take_time(f[TIME_COMPLETED], 0, &row->wide[ENDED]) ||
      !take_time(f[TIMEOUT_MS], 0, &row->wide[TIMEOUT]))
    return 0;
  r->begun |= begun != 0;
  return 1;
}

const struct value *entries_of(const struct reader *r) {
  const struct value *found = NULL;
  if (r->result.kind != DICT) return NULL;
  const struct value *v = items(r, r->result);
  for (uint32_t n = several(r, r->result)->n; n > 0; n -= 2, v += 2)
    if (is(texts(r) + v->ref, "entries")) found = v + 1;
  return found != NULL && found->kind == LIST ? found : NULL;
}

/* Whether all is ready for the entries of one more dump. */
static int begin(struct reader *r, size_t n) {
  size_t slots = 256;
  while (slots < 2 * n) slots *= 2;
  if (!make_room(r, &r->canons, MAX_CANONS, sizeof(struct canon)) ||
      !make_room(r, &r->groups, MAX_GROUPS, sizeof(struct group)) ||
      !make_room(r, &r->calls, n, sizeof(struct call)) ||
      !make_room(r, &r->call_slots, slots, sizeof(uint32_t)) ||
      !make_room(r, &r->texts, r->n_texts + 1, sizeof(struct text)))
    return 0;
  if (r->slots.at == NULL) {
    if (!make_room(r, &r->slots, SLOTS, sizeof(uint32_t))) return 0;
    memset(r->slots.at, 0, SLOTS * sizeof(uint32_t));
  }
  for (size_t i = 0; i < r->n_canons; i++)
    ((uint32_t *)r->slots.at)[((struct canon *)r->canons.at)[i].slot] = 0;
  memset(r->call_slots.at, 0, slots * sizeof(uint32_t));
  r->call_mask = (uint32_t)slots - 1;
  r->n_canons = r->n_names = r->n_types = r->n_groups = r->n_calls = 0;
  r->begun = 0;
  r->work = WORK_LEAST + r->length * WORK_EACH;
  texts(r)[r->n_texts] = (struct text){r->data, 0, -1, -1};
  r->empty = (struct value){TEXT, (uint32_t)r->n_texts++, 0};
  return 1;
}

int read_entries(struct reader *r, int64_t *wide, int32_t *narrow, uint8_t *is_p2p, size_t n) {
  const struct value *entries = entries_of(r);
  if (entries == NULL || several(r, *entries)->n != n || !begin(r, n)) return 0;
  const struct value *entry = items(r, *entries);
  for (size_t i = 0; i < n; i++) {
    struct row row;
    if (!take_entry(r, entry[i], &row)) return 0;
    for (size_t k = 0; k < WIDE; k++) wide[k * n + i] = row.wide[k];
    for (size_t k = 0; k < NARROW; k++) narrow[k * n + i] = row.narrow[k];
    is_p2p[i] = row.is_p2p;
  }
  return 1;
}
