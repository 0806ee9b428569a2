/* The bytes. They pass through the communicator's file, behind the segment: a
 * rank writes its part when it arrives at a collective and reads the others'
 * when all have come; a message of a pair goes through one of a few places.
 * Reading and writing the file, not mapping it, makes a full /dev/shm an error
 * and not a signal.
 *
 * Collective k lies at place k % 2 of its rank: who arrives at k + 2 has seen all
 * arrive at k + 1, and they do so after they have read k. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

#define STRIDE ((off_t)1 << 32) /* bytes of a place; the file is sparse */
#define KEEP ((size_t)1 << 20)  /* larger ones give their memory back when they were read */
#define CHUNK ((size_t)1 << 16)

static int (*_Atomic g_holds)(const void *pointer, size_t size);

void simSetMemory(int (*holds)(const void *pointer, size_t size)) {
  atomic_store(&g_holds, holds);
}

bool sim_data_on(void) { return atomic_load(&g_holds) != NULL; }

static bool held(const void *pointer, size_t size) {
  int (*holds)(const void *, size_t) = atomic_load(&g_holds);
  return holds && pointer && size && size <= (size_t)STRIDE && holds(pointer, size);
}

/* ---- the file ---- */
static off_t base(const struct sim_state *st) {
  return (off_t)((st->shm->size + 4095) & ~(size_t)4095);
}

static off_t coll_place(const struct sim_state *st, int rank, uint64_t k) {
  return base(st) + ((off_t)rank * 2 + (off_t)(k % 2)) * STRIDE;
}

static off_t p2p_place(const struct sim_state *st, int src, int dst, uint64_t idx, unsigned slots) {
  off_t pair = (off_t)src * st->nranks + dst;
  return base(st) + (2 * (off_t)st->nranks + pair * slots + (off_t)(idx % slots)) * STRIDE;
}

static bool put(struct sim_state *st, off_t at, const void *from, size_t size) {
  int fd = sim_shm_data(st->shm);
  for (size_t done = 0; done < size;) {
    ssize_t n = pwrite(fd, (const char *)from + done, size - done, at + (off_t)done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      sim_fail(ncclSystemError, "/dev/shm: %s", strerror(errno));
      return false;
    }
    done += (size_t)n;
  }
  return true;
}

/* What nobody wrote (a peer's buffer that is no device memory) reads as zeros or as
 * what was there before. */
static bool get(struct sim_state *st, off_t at, void *to, size_t size) {
  int fd = sim_shm_data(st->shm);
  for (size_t done = 0; done < size;) {
    ssize_t n = pread(fd, (char *)to + done, size - done, at + (off_t)done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      sim_fail(ncclSystemError, "/dev/shm: %s", strerror(errno));
      return false;
    }
    if (n == 0) {
      memset((char *)to + done, 0, size - done);
      break;
    }
    done += (size_t)n;
  }
  return true;
}

static void give_back(struct sim_state *st, off_t at, size_t size) {
  if (size > KEEP)
    fallocate(sim_shm_data(st->shm), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, (off_t)size);
}

/* ---- numbers of 8 and 16 bits: to float and back, to nearest even ---- */
struct small {
  int exponent, mantissa; /* bits */
  bool infinite;          /* has infinities; else all ones is the only NaN */
};
static const struct small F16 = {5, 10, true}, E4M3 = {4, 3, false}, E5M2 = {5, 2, true};

static float widen(unsigned v, struct small s) {
  unsigned top = (1U << s.exponent) - 1, m = v & ((1U << s.mantissa) - 1);
  unsigned e = v >> s.mantissa & top;
  int bias = (int)(top >> 1);
  float f;
  if (e == top && s.infinite) f = m ? NAN : INFINITY;
  else if (e == top && m == (1U << s.mantissa) - 1) f = NAN;
  else if (e == 0) f = ldexpf((float)m, 1 - bias - s.mantissa);
  else f = ldexpf((float)(m + (1U << s.mantissa)), (int)e - bias - s.mantissa);
  return v >> (s.exponent + s.mantissa) & 1 ? -f : f;
}

static unsigned narrow(float f, struct small s) {
  unsigned top = (1U << s.exponent) - 1, sign = signbit(f) ? 1U << (s.exponent + s.mantissa) : 0;
  unsigned ones = (1U << (s.exponent + s.mantissa)) - 1;
  int bias = (int)(top >> 1), e;
  if (isnan(f)) return sign | ones;
  f = fabsf(f);
  unsigned inf = s.infinite ? top << s.mantissa : ones; /* no infinity: NaN */
  if (isinf(f)) return sign | inf;
  if (f == 0) return sign;
  frexpf(f, &e);
  if (--e < 1 - bias) e = 1 - bias; /* subnormal */
  unsigned m = (unsigned)nearbyintf(ldexpf(f, s.mantissa - e));
  unsigned v = ((unsigned)(e + bias - 1) << s.mantissa) + m; /* m carries into the exponent */
  return sign | (v >= inf ? inf : v);
}

static float widen_bf16(uint16_t v) {
  uint32_t bits = (uint32_t)v << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static uint16_t narrow_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if (isnan(f)) return (uint16_t)(bits >> 16 | 64);
  return (uint16_t)((bits + 32767 + (bits >> 16 & 1)) >> 16);
}

/* ---- reductions: acc[i] = acc[i] op in[i]; ncclAvg divides after the last rank ---- */
#define APPLY(op, a, b) \
  ((op) == ncclProd ? (a) * (b) : (op) == ncclMax ? ((a) > (b) ? (a) : (b)) \
   : (op) == ncclMin ? ((a) < (b) ? (a) : (b)) : (a) + (b))
#define REDUCE(type, wide) \
  { \
    type *a = acc; \
    const type *b = in; \
    for (size_t i = 0; i < n; i++) a[i] = (type)APPLY(op, (wide)a[i], (wide)b[i]); \
    if (divide) \
      for (size_t i = 0; i < n; i++) a[i] = (type)(a[i] / (type)divide); \
    break; \
  }
#define REDUCE_SMALL(type, to, from) \
  { \
    type *a = acc; \
    const type *b = in; \
    for (size_t i = 0; i < n; i++) { \
      float x = to(a[i]), y = to(b[i]), r = APPLY(op, x, y); \
      a[i] = (type)from(divide ? r / (float)divide : r); \
    } \
    break; \
  }
#define WIDEN_F16(v) widen(v, F16)
#define NARROW_F16(f) narrow(f, F16)
#define WIDEN_E4M3(v) widen(v, E4M3)
#define NARROW_E4M3(f) narrow(f, E4M3)
#define WIDEN_E5M2(v) widen(v, E5M2)
#define NARROW_E5M2(f) narrow(f, E5M2)

/* Integers are reduced unsigned where they may overflow: they wrap, as on a GPU. */
static void reduce(int type, int op, void *acc, const void *in, size_t n, int divide) {
  bool order = op == ncclMax || op == ncclMin;
  switch (type) {
  case ncclInt8: REDUCE(int8_t, int)
  case ncclUint8: REDUCE(uint8_t, unsigned)
  case ncclInt32:
    if (order) REDUCE(int32_t, int32_t)
    REDUCE(int32_t, uint32_t)
  case ncclUint32: REDUCE(uint32_t, uint32_t)
  case ncclInt64:
    if (order) REDUCE(int64_t, int64_t)
    REDUCE(int64_t, uint64_t)
  case ncclUint64: REDUCE(uint64_t, uint64_t)
  case ncclFloat32: REDUCE(float, float)
  case ncclFloat64: REDUCE(double, double)
  case ncclFloat16: REDUCE_SMALL(uint16_t, WIDEN_F16, NARROW_F16)
  case ncclBfloat16: REDUCE_SMALL(uint16_t, widen_bf16, narrow_bf16)
  case ncclFloat8e4m3: REDUCE_SMALL(uint8_t, WIDEN_E4M3, NARROW_E4M3)
  case ncclFloat8e5m2: REDUCE_SMALL(uint8_t, WIDEN_E5M2, NARROW_E5M2)
  default: break;
  }
}

/* Elements [first, first + count) of all ranks' parts, reduced in rank order. */
static bool reduce_all(struct sim_state *st, uint64_t k, const struct sim_coll *c, size_t first) {
  _Alignas(16) static char part[CHUNK]; /* under the lock */
  size_t size = sim_type_size((ncclDataType_t)c->type), step = CHUNK / size;
  for (size_t at = 0; at < c->count; at += step) {
    size_t n = c->count - at < step ? c->count - at : step;
    off_t offset = (off_t)((first + at) * size);
    char *to = (char *)c->recv + at * size;
    if (!get(st, coll_place(st, 0, k) + offset, to, n * size)) return false;
    for (int r = 1; r < st->nranks; r++) {
      if (!get(st, coll_place(st, r, k) + offset, part, n * size)) return false;
      bool last = c->op == ncclAvg && r == st->nranks - 1;
      reduce(c->type, c->op, to, part, n, last ? st->nranks : 0);
    }
  }
  return true;
}

/* ---- collectives ---- */
static size_t sent_bytes(const struct sim_state *st, const struct sim_coll *c) {
  size_t bytes = c->count * sim_type_size((ncclDataType_t)c->type);
  return c->fn == FN_REDUCESCATTER ? bytes * (size_t)st->nranks : bytes;
}

bool sim_coll_put(struct sim_state *st, uint64_t k, const struct sim_coll *c) {
  size_t bytes = sent_bytes(st, c);
  if (c->fn == FN_BROADCAST && c->root != st->rank) return true;
  if (!held(c->send, bytes)) return true;
  return put(st, coll_place(st, st->rank, k), c->send, bytes);
}

bool sim_coll_get(struct sim_state *st, uint64_t k, const struct sim_coll *c) {
  size_t bytes = c->count * sim_type_size((ncclDataType_t)c->type);
  size_t whole = c->fn == FN_ALLGATHER ? bytes * (size_t)st->nranks : bytes;
  bool ok = true;
  /* All have read what lies at the other place: they have come to k. */
  if (sim_data_on()) give_back(st, coll_place(st, st->rank, k + 1), sent_bytes(st, c));
  if ((c->fn == FN_REDUCE && c->root != st->rank) || !held(c->recv, whole)) return true;
  switch (c->fn) {
  case FN_BROADCAST:
    return get(st, coll_place(st, c->root, k), c->recv, bytes);
  case FN_ALLGATHER:
    for (int r = 0; r < st->nranks && ok; r++)
      ok = get(st, coll_place(st, r, k), (char *)c->recv + (size_t)r * bytes, bytes);
    return ok;
  case FN_REDUCESCATTER:
    return reduce_all(st, k, c, (size_t)st->rank * c->count);
  default:
    return reduce_all(st, k, c, 0);
  }
}

/* ---- messages ---- */
bool sim_p2p_put(struct sim_state *st, const struct sim_p2p *p, unsigned slots) {
  if (!held(p->buff, p->bytes)) return true;
  return put(st, p2p_place(st, st->rank, p->peer, p->idx, slots), p->buff, p->bytes);
}

bool sim_p2p_get(struct sim_state *st, const struct sim_p2p *p, unsigned slots) {
  if (!held(p->buff, p->bytes)) return true;
  off_t at = p2p_place(st, p->peer, st->rank, p->idx, slots);
  bool ok = get(st, at, p->buff, p->bytes);
  give_back(st, at, p->bytes);
  return ok;
}

/* ---- one rank: from its own buffer to its own buffer, in the stream's order ---- */
struct copy {
  void *to;
  const void *from;
  size_t bytes;
};

static int copy_step(void *arg) {
  struct copy *c = arg;
  if (held(c->to, c->bytes) && held(c->from, c->bytes)) memmove(c->to, c->from, c->bytes);
  free(c);
  return 1;
}

void sim_copy(cudaStream_t stream, void *to, const void *from, size_t bytes) {
  if (!sim_data_on() || to == from) return;
  struct copy *c = malloc(sizeof *c);
  *c = (struct copy){to, from, bytes};
  simStreamEnqueue(stream, copy_step, c);
}
