/* The preload library's own state; see docs/preload.md for the rules.
 *
 * After a thread's first call nothing here takes a lock, allocates or enters the
 * kernel, lifecycle calls aside (they check the caller's pointers). */
#ifndef NCP_PRELOAD_H
#define NCP_PRELOAD_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "../../ebpf/include/ncp_api.h"
#include "ncp_shm.h"

#define NCP_HIDDEN __attribute__((visibility("hidden")))
#define NCP_INLINE static inline __attribute__((always_inline))
#define NCP_COLD NCP_HIDDEN __attribute__((noinline, cold))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

#define ncp_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define ncp_peek(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define ncp_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define ncp_poke(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define ncp_add(p, n) __atomic_fetch_add((p), (n), __ATOMIC_RELAXED)

#define NCP_COMMS 16384  /* communicator addresses of a process, ever */
#define NCP_P2P 131072   /* (address, direction, peer) ever used */
#define NCP_PROBES 64    /* places that are looked at for a key */
#define NCP_PENDING 16   /* children of one thread whose handles are not written yet */
#define NCP_INIT_ALL 64  /* devices of one ncclCommInitAll */

struct ncp_uid {
  u8 bytes[128];
};

/* A communicator's address; the key of a place never changes once it is set. */
struct ncp_comm {
  u64 key;  /* the address; 0: free */
  u64 life; /* generation, or'ed with NCP_LATE; 0: closed */
  u64 calls, collectives, children;
  u64 birth; /* 1 + its place among the births */
  u64 look;  /* at the live struct: NCP_LOOK_*, and how often it was not ready */
  u64 apart;
};
#define NCP_LATE (1ULL << 32)
#define NCP_LOOK_DONE 1
#define NCP_LOOK_SOUND 2 /* it was read and makes sense */
#define NCP_LOOK_TRY 4
#define NCP_LOOK_TRIES 64

struct ncp_p2p {
  u64 key;   /* place of the communicator, direction, peer; 0: free */
  u64 value; /* low bits of the generation, and the count */
};

struct ncp_pending {
  struct ncp_record rec;
  u64 out;
  char name[NCP_NAME_SIZE];
};

/* A thread that has called NCCL. */
struct ncp_thread {
  u32 alive; /* wiped by a fork */
  u32 inside;
  struct ncp_shm_slot *slot;
  struct ncp_record *ring, *rec;
  u64 head, seq;
  u32 at, cap; /* place of `rec` in the ring, and its places */
  long long time_off;
  uintptr_t frame; /* of the call it is inside */
  u64 last_ptr;
  struct ncp_comm *last;
  u32 tid, pid;
  u32 group_id;
  u16 group_pos;
  u8 depth, named;
  u16 copy; /* of the call it is inside */
  u16 pending;
  u64 token; /* on the stack of the call it is inside */
  u64 out;
  char name[NCP_NAME_SIZE];
  struct ncp_pending children[NCP_PENDING];
} __attribute__((aligned(128)));

/* Everything that a fork must not inherit. */
struct ncp_state {
  u64 alive;
  u64 next_gen;
  u64 next_group;
  u64 used_slots;
  struct ncp_thread threads[NCP_SHM_SLOTS];
  struct ncp_comm comms[NCP_COMMS];
  struct ncp_p2p p2p[NCP_P2P];
};

/* A copy of NCCL, and its functions by id. */
struct ncp_copy {
  uintptr_t base;
  char name[NCP_SHM_PATH]; /* as the linker knows it */
  u32 hash_form;
  u32 ready;
  void *real[NCP_API_MAX + 1];
};

/* What an exported name means for callers in [lo, lo + span). Never changed. */
struct ncp_binding {
  void *real;
  uintptr_t lo, span;
  u32 copy;
  const struct ncp_binding *next;
};

extern NCP_HIDDEN __thread struct ncp_thread *ncp_self __attribute__((tls_model("initial-exec")));
extern NCP_HIDDEN struct ncp_state *ncp_state;
extern NCP_HIDDEN struct ncp_shm *ncp_shm;
extern NCP_HIDDEN struct ncp_copy ncp_copies[NCP_SHM_COPIES];
extern NCP_HIDDEN const struct ncp_binding *ncp_bindings[NCP_API_MAX + 1];
extern NCP_HIDDEN const char *const ncp_names[NCP_API_MAX + 1];
extern NCP_HIDDEN void *const ncp_sets[NCP_SHM_COPIES][NCP_API_MAX + 1];
extern NCP_HIDDEN void *const ncp_exported[NCP_API_MAX + 1];
extern NCP_HIDDEN const char *const ncp_launcher_names[];

#define NCP_EXPORTED 0xffffu /* in place of a copy: whichever the caller means */
#define NCP_NO_COPY 0xfffeu
#define NCP_MISSING 0xfffdu /* no copy has the function */

/* start.c */
NCP_COLD struct ncp_thread *ncp_thread_start(void);
NCP_COLD void ncp_say(const char *what, const char *why);

/* sys.c: system calls whose wrappers changed between releases of glibc */
struct ncp_stat {
  u64 dev, ino, size;
  u32 mode, uid;
};
NCP_HIDDEN int ncp_stat_fd(int fd, struct ncp_stat *st);
NCP_HIDDEN int ncp_stat_at(int dir, const char *path, int flags, struct ncp_stat *st);
NCP_HIDDEN long ncp_read_file(const char *path, char *text, size_t size);
NCP_HIDDEN int ncp_readable(u64 at, size_t bytes);
NCP_HIDDEN u64 ncp_number(const char **text);
NCP_HIDDEN u32 ncp_tid(void);
NCP_HIDDEN u64 ncp_now_raw(void);

/* real.c */
NCP_COLD const struct ncp_binding *ncp_bind(unsigned api, uintptr_t from, struct ncp_thread *th);
NCP_HIDDEN u32 ncp_register(void *function);
NCP_COLD int ncp_missing(void);
NCP_COLD void ncp_untraced(struct ncp_thread *th, u32 copy);
NCP_HIDDEN void ncp_real_after_fork(void);
NCP_HIDDEN void ncp_publish_copies(void);
NCP_HIDDEN extern void *(*ncp_real_dlsym)(void *, const char *);
NCP_HIDDEN extern void *(*ncp_real_dlvsym)(void *, const char *, const char *);

/* comm.c */
NCP_HIDDEN struct ncp_comm *ncp_comm_find(u64 ptr, int add);
NCP_COLD u64 ncp_comm_late(struct ncp_comm *c);
NCP_HIDDEN u32 ncp_comm_made(struct ncp_thread *th, u32 gen, u64 ptr);
NCP_HIDDEN void ncp_comm_closed(struct ncp_comm *c);
NCP_HIDDEN int ncp_p2p_next(const struct ncp_comm *c, u32 gen, int direction, int peer, u64 *n);
NCP_HIDDEN void ncp_birth(const struct ncp_record *made, u64 ptr, u32 gen, const char *name);
NCP_HIDDEN void ncp_birth_identity(struct ncp_comm *c, const struct ncp_record *identity);

/* live.c */
NCP_COLD u64 ncp_identify(struct ncp_thread *th, struct ncp_comm *c);

/* life.c */
NCP_COLD void ncp_take_one(struct ncp_thread *th, u64 now, u64 want);
NCP_COLD void ncp_life_enter(struct ncp_thread *th, struct ncp_record *r, u64 out, u64 uid,
                             u64 config);
NCP_COLD void ncp_life_exit(struct ncp_thread *th, struct ncp_record *r, u64 now);
NCP_COLD void ncp_group_exit(struct ncp_thread *th, u64 now, int ok);
NCP_COLD void ncp_uid_made(struct ncp_thread *th, u64 uid);
NCP_COLD int ncp_is_nested(struct ncp_thread *th, unsigned api, uintptr_t frame, u64 now);

NCP_INLINE u64 ncp_now(const struct ncp_thread *th) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (u64)t.tv_sec * 1000000000u + (u64)t.tv_nsec + (u64)th->time_off;
}

/* Publishes the record at `rec` and goes on to the next place. */
NCP_INLINE void ncp_emit(struct ncp_thread *th) {
  ncp_store(&th->slot->head, ++th->head);
  if (++th->at == th->cap) th->at = 0;
  th->rec = th->ring + th->at;
}

#endif
