/* Communicators by address, and the counters of point-to-point calls.
 *
 * Both tables are open addressing without locks: the key of a place is set once,
 * by compare and swap, and never changes; only what belongs to it does. So a
 * found place may be remembered for ever. What an address means now is its
 * generation; 0 while it means nothing. */
#include "preload.h"

NCP_INLINE u64 mix(u64 x) {
  x *= 0x9e3779b97f4a7c15ULL;
  return x ^ x >> 29;
}

/* The place of a key among `n` (a power of two); taken for it with `add`. */
NCP_INLINE u64 *place(u64 *keys, size_t stride, size_t n, u64 key, int add) {
  size_t at = (size_t)(mix(key) >> 7);
  for (int i = 0; i < NCP_PROBES; i++, at++) {
    u64 *k = keys + (at & (n - 1)) * stride;
    u64 there = ncp_load(k);
    if (there == key) return k;
    if (there) continue;
    if (!add) return 0;
    if (__atomic_compare_exchange_n(k, &there, key, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return k;
    if (there == key) return k;
  }
  return 0;
}

struct ncp_comm *ncp_comm_find(u64 ptr, int add) {
  return (struct ncp_comm *)(void *)place(&ncp_state->comms[0].key, sizeof(struct ncp_comm) / 8,
                                          NCP_COMMS, ptr, add);
}

/* Its making was not seen: opens a generation. 0 is not possible. */
u64 ncp_comm_late(struct ncp_comm *c) {
  u64 life = 0, mine = ((ncp_add(&ncp_state->next_gen, 1) + 1) & 0xffffffffu) | NCP_LATE;
  if (__atomic_compare_exchange_n(&c->life, &life, mine, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    return mine;
  return life; /* another thread was first */
}

static void reset(struct ncp_comm *c) {
  ncp_poke(&c->calls, 0);
  ncp_poke(&c->collectives, 0);
  ncp_poke(&c->children, 0);
  ncp_poke(&c->look, 0);
}

/* A generation opened by the call that made it; whatever had the same address
 * before is over. 0: no room. */
u32 ncp_comm_made(struct ncp_thread *th, u32 gen, u64 ptr) {
  struct ncp_comm *c = ncp_comm_find(ptr, 1);
  if (!c) {
    ncp_poke(&th->slot->blind, th->slot->blind + 1);
    return 0;
  }
  reset(c);
  ncp_store(&c->life, (u64)gen);
  return gen;
}

static struct ncp_shm_birth *births(void) {
  return (struct ncp_shm_birth *)(void *)((char *)ncp_shm + ncp_shm->births_at);
}

/* The counters go first: whoever sees the address as free may use it. */
void ncp_comm_closed(struct ncp_comm *c) {
  u64 birth = ncp_peek(&c->birth);
  if (birth) {
    struct ncp_shm_birth *b = births() + (birth - 1);
    if (ncp_peek(&b->gen) == (u32)ncp_peek(&c->life)) ncp_poke(&b->closed, 1);
  }
  reset(c);
  ncp_store(&c->life, (u64)0);
}

#define P2P_COUNT_BITS 44

/* The ordinal of a send or recv; 0: no room. */
int ncp_p2p_next(const struct ncp_comm *c, u32 gen, int direction, int peer, u64 *n) {
  u64 at = (u64)(c - ncp_state->comms) + 1;
  u64 key = at << 40 | (u64)direction << 32 | (u32)peer;
  struct ncp_p2p *p = (struct ncp_p2p *)(void *)place(
      &ncp_state->p2p[0].key, sizeof(struct ncp_p2p) / 8, NCP_P2P, key, 1);
  if (!p) return 0;
  u64 mark = (u64)(gen & 0xfffffu) << P2P_COUNT_BITS;
  u64 value = ncp_peek(&p->value);
  do {
    /* Left by an earlier communicator of this address: begins anew. */
    *n = value >> P2P_COUNT_BITS == mark >> P2P_COUNT_BITS ? value & ((1ULL << P2P_COUNT_BITS) - 1) : 0;
  } while (!__atomic_compare_exchange_n(&p->value, &value, mark | (*n + 1), 1, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  return 1;
}

/* Odd from here on; an exchange, so that nothing that follows comes before it. */
static void begin_birth(struct ncp_shm_birth *b) {
  __atomic_exchange_n(&b->seq, ncp_peek(&b->seq) | 1, __ATOMIC_ACQ_REL);
}

static struct ncp_shm_birth *open_birth(struct ncp_comm *c, u32 gen) {
  u64 at = ncp_add(&ncp_shm->births_made, 1) % NCP_SHM_BIRTHS;
  struct ncp_shm_birth *b = births() + at;
  begin_birth(b);
  ncp_poke(&b->gen, gen);
  ncp_poke(&b->closed, 0);
  __builtin_memset(&b->rec, 0, sizeof(*b) - offsetof(struct ncp_shm_birth, rec));
  if (c) ncp_poke(&c->birth, at + 1);
  return b;
}

/* Keeps what made a communicator, for a collector that comes when the record is
 * overwritten. */
void ncp_birth(const struct ncp_record *made, u64 ptr, u32 gen, const char *name) {
  struct ncp_shm_birth *b = open_birth(ncp_comm_find(ptr, 0), gen);
  b->rec = *made;
  b->rec.kind = NCP_KIND_NEW_COMM;
  b->rec.new_comm = ptr;
  b->rec.new_gen = gen;
  b->rec.rc = 0;
  b->rec.call_idx = 0;
  __builtin_memcpy(b->name, name, NCP_NAME_SIZE);
  ncp_store(&b->seq, ncp_peek(&b->seq) + 1);
}

/* The same for what its struct says. */
void ncp_birth_identity(struct ncp_comm *c, const struct ncp_record *identity) {
  u64 birth = ncp_peek(&c->birth);
  struct ncp_shm_birth *b = birth ? births() + (birth - 1) : 0;
  if (b && ncp_peek(&b->gen) == identity->comm_gen) {
    begin_birth(b);
  } else {
    b = open_birth(c, identity->comm_gen);
  }
  b->identity = *identity;
  ncp_store(&b->seq, ncp_peek(&b->seq) + 1);
}
