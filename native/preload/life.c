/* Calls that make and end communicators, and ends of groups: what they tell
 * beyond their arguments. The semantics are those of ebpf/include/ncp_comm.h. */
#include "call.h"
#include "ncp_hash.h"

#define NO_COLOR (-1)

/* A word of the caller's memory; 0 when it cannot be read. */
static u64 word_at(u64 at) {
  u64 value = 0;
  if (at && ncp_readable(at, sizeof(value))) __builtin_memcpy(&value, (void *)(uintptr_t)at, 8);
  return value;
}

static void hash_uid(struct ncp_record *r, u64 at) {
  u32 form = r->lib < NCP_SHM_COPIES ? ncp_copies[r->lib].hash_form : 0;
  if (!at || !form || !ncp_readable(at, NCP_UNIQUE_ID_BYTES)) return;
  const unsigned char *id = (const unsigned char *)(uintptr_t)at;
  if (form == 3) {
    r->uid_hash = ncp_hash_226(id);
  } else if (form == 2) {
    r->uid_hash = ncp_hash_djb2a(id);
    r->log_hash = ncp_hash_uniqueid(id);
  } else {
    r->uid_hash = ncp_hash_uniqueid(id);
  }
}

/* The head of ncclConfig_t: the same in all versions as far as it is there. */
static void read_config(struct ncp_thread *th, struct ncp_record *r, u64 at) {
  if (!at || !ncp_readable(at, 32)) return;
  const char *config = (const char *)(uintptr_t)at;
  u64 size, name;
  u32 magic;
  int blocking;
  __builtin_memcpy(&size, config, 8);
  __builtin_memcpy(&magic, config + 8, 4);
  __builtin_memcpy(&blocking, config + 16, 4);
  if (magic != 0xcafebeefu || size < 20) return;
  if (blocking == 0) r->flags |= NCP_FLAG_NONBLOCKING;
  if (size < 56) return; /* commName came with 2.27 */
  name = word_at(at + 48);
  for (unsigned i = 0; name && i < NCP_NAME_SIZE - 1; i++) {
    /* Checked where a page may begin. */
    if ((i == 0 || ((name + i) & 4095) == 0) && !ncp_readable(name + i, 1)) break;
    char c = ((const char *)(uintptr_t)name)[i];
    if (!c) break;
    th->name[i] = c;
    th->named = 1;
  }
}

void ncp_life_enter(struct ncp_thread *th, struct ncp_record *r, u64 out, u64 uid, u64 config) {
  th->out = out;
  th->named = 0;
  __builtin_memset(th->name, 0, sizeof(th->name));
  if (ncp_api_init_uid(r->api)) hash_uid(r, uid);
  read_config(th, r, config);
}

/* Made by ncclCommInitAll for itself: the hash of what it is making. */
void ncp_uid_made(struct ncp_thread *th, u64 uid) {
  if (th->inside == NCP_API_COMM_INIT_ALL) hash_uid(th->rec, uid);
}

static u32 new_gens(u32 n) { return (u32)ncp_add(&ncp_state->next_gen, n) + 1; }

static void emit_name(struct ncp_thread *th, const struct ncp_record *made, const char *name) {
  struct ncp_record *r = th->rec;
  *r = *made;
  r->kind = NCP_KIND_NAME;
  __builtin_memcpy((char *)r + NCP_NAME_OFFSET, name, NCP_NAME_SIZE);
  ncp_emit(th);
}

/* A handle that an earlier call of this thread was to write, now written. */
static void take(struct ncp_thread *th, struct ncp_pending *p, u64 ptr, u64 now) {
  u32 gen = ncp_comm_made(th, new_gens(1), ptr);
  p->rec.t_exit = now;
  p->rec.new_comm = ptr;
  p->rec.new_gen = gen;
  if (gen) ncp_birth(&p->rec, ptr, gen, p->name);
  *th->rec = p->rec;
  ncp_emit(th);
  if (p->name[0] && gen) emit_name(th, &p->rec, p->name);
}

/* The end of a group: opens a generation for each handle that its calls have
 * written, and forgets them if the group failed. The group's record is the last
 * one published. */
void ncp_group_exit(struct ncp_thread *th, u64 now, int ok) {
  const struct ncp_record *group = th->ring + (th->at ? th->at : th->cap) - 1;
  u32 id = group->group_id, n = th->pending;
  th->pending = 0;
  for (u32 i = 0; i < n; i++) {
    struct ncp_pending *p = &th->children[i];
    if (!p->out) continue;
    int ours = p->rec.group_id == id;
    u64 ptr = ours ? word_at(p->out) : 0;
    if (!ptr && (ok || !ours)) {
      th->pending = (u16)(i + 1); /* not blocking: another thread will write it */
      continue;
    }
    if (ok) take(th, p, ptr, now);
    p->out = 0;
  }
}

/* A communicator that nobody told of is used: is it one of those? Called with a
 * record half written at th->rec, which moves. */
void ncp_take_one(struct ncp_thread *th, u64 now, u64 want) {
  for (u32 i = 0; i < th->pending; i++) {
    struct ncp_pending *p = &th->children[i];
    if (!p->out || word_at(p->out) != want) continue;
    struct ncp_record half = *th->rec;
    take(th, p, want, now);
    *th->rec = half;
    p->out = 0;
    return;
  }
}

/* Remembers a child whose handle is not written yet. */
static void defer(struct ncp_thread *th, const struct ncp_record *r) {
  if (th->pending >= NCP_PENDING) return;
  struct ncp_pending *p = &th->children[th->pending++];
  p->rec = *r;
  p->rec.kind = NCP_KIND_NEW_COMM;
  p->rec.call_idx = 0;
  p->rec.rc = 0;
  p->out = th->out;
  __builtin_memcpy(p->name, th->name, sizeof(p->name));
}

/* ncclCommInitAll: one generation per device, with consecutive numbers. */
static void made_all(struct ncp_thread *th, struct ncp_record *r) {
  u32 n = (u32)r->nranks;
  if (n == 0 || n > NCP_INIT_ALL) return;
  u32 gen = new_gens(n);
  struct ncp_record one = *r;
  one.api = NCP_API_COMM_INIT_RANK;
  for (u32 i = 0; i < n; i++) {
    u64 ptr = word_at(th->out + i * 8);
    if (!ptr) continue;
    one.peer = (int)i;
    if (!ncp_comm_made(th, gen + i, ptr))
      r->flags |= NCP_FLAG_BLIND;
    else
      ncp_birth(&one, ptr, gen + i, th->name);
    if (i == 0) r->new_comm = ptr;
  }
  r->new_gen = gen;
}

/* What the call made, and its record. A failed call leaves the caller's handle
 * as it was, and does not come here. */
void ncp_life_exit(struct ncp_thread *th, struct ncp_record *r, u64 now) {
  (void)now;
  if (r->api == NCP_API_COMM_INIT_ALL) {
    made_all(th, r);
  } else {
    u64 ptr = word_at(th->out);
    if (ptr) {
      r->new_comm = ptr;
      r->new_gen = ncp_comm_made(th, new_gens(1), ptr);
      if (!r->new_gen)
        r->flags |= NCP_FLAG_BLIND;
      else
        ncp_birth(r, ptr, r->new_gen, th->name);
    } else if (!(r->api == NCP_API_COMM_SPLIT && r->color == NO_COLOR)) {
      defer(th, r);
    }
  }
  ncp_emit(th);
  if (r->new_gen && th->named) emit_name(th, r, th->name);
}

static int outermost(unsigned api) {
  int class = ncp_api_class(api);
  return class == NCP_CLASS_COLLECTIVE || class == NCP_CLASS_P2P || class == NCP_CLASS_GROUP ||
         class == NCP_CLASS_ONE_SIDED;
}

/* A call while the thread is inside one. Deeper on the stack it is NCCL's own,
 * if the outer one is still there; else the outer one was left by longjmp or an
 * exception, and its record ends here. */
int ncp_is_nested(struct ncp_thread *th, unsigned api, uintptr_t frame, u64 now) {
  int nested = frame < th->frame;
  if (nested && th->inside != NCP_API_BCAST && outermost(api) && outermost(th->inside)) {
    u64 call = th->token ^ th->rec->t_enter;
    nested = word_at(call + offsetof(struct ncp_call, token)) == th->token;
  }
  if (nested) {
    ncp_poke(&th->slot->nested, th->slot->nested + 1);
    return 1;
  }
  th->inside = 0;
  th->rec->t_exit = now;
  th->rec->flags |= NCP_FLAG_UNWOUND;
  ncp_poke(&th->slot->unwound, th->slot->unwound + 1);
  ncp_emit(th);
  ncp_store(&th->slot->seq, ++th->seq);
  return 0;
}
