/* The first call of a process: its file; and of a thread: its slot.
 *
 * A process that never calls NCCL comes no further than the constructor, which
 * reads the environment and opens nothing. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "file.h"

__thread struct ncp_thread *ncp_self __attribute__((tls_model("initial-exec")));
struct ncp_state *ncp_state;
struct ncp_shm *ncp_shm;

enum { NOT_YET, STARTING, ON, OFF };
static u32 phase;
static __thread int starting __attribute__((tls_model("initial-exec")));
/* Calls that a thread without a slot makes before it asks again, and their number. */
static __thread u32 refused __attribute__((tls_model("initial-exec")));
static __thread u32 wait_for __attribute__((tls_model("initial-exec")));
static int wiped; /* the kernel empties the state of a fork's child */

void ncp_say(const char *what, const char *why) {
  char line[512] = "nccluprobe: tracing is off in this process: ";
  size_t n = strlen(line);
  const char *const parts[] = {what, ": ", why, "\n"};
  for (int i = 0; i < 4; i++)
    for (const char *c = parts[i]; *c && n < sizeof(line) - 2; c++) line[n++] = *c;
  line[n - 1] = '\n';
  if (write(2, line, n) < 0) return;
}

/* In the child of a fork: the parent's file is not ours. */
static void after_fork(void) {
  if (ncp_self) ncp_self->alive = 0;
  ncp_self = 0;
  refused = 0;
  if (phase != OFF) phase = NOT_YET;
  ncp_real_after_fork();
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(0, 0, after_fork); }

/* A kernel before 4.14, or a fork by system call only, lack one of the two ways
 * in which a child is told; each is enough. */
static int make_state(void) {
  size_t size = sizeof(struct ncp_state);
  void *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return -1;
  wiped = madvise(at, size, 18 /* MADV_WIPEONFORK */) == 0;
  ncp_state = at;
  return 0;
}

static int start(void) {
  const char *what = "out of memory";
  if (ncp_file_disabled()) return -1;
  if (ncp_other_front()) return -1;
  if (make_state() || ncp_file_make(&what)) {
    ncp_say(what, errno ? strerror(errno) : "not enough room");
    return -1;
  }
  if (wiped) madvise(ncp_shm, ncp_shm->file_size, MADV_DONTFORK);
  ncp_publish_copies(); /* and the state is alive */
  return 0;
}

/* Whether the process is traced; decides it at its first call. */
static int started(void) {
  u32 now = ncp_load(&phase);
  if (now == ON && likely(ncp_load(&ncp_state->alive))) return 1;
  if (now == OFF) return 0;
  if (now == ON) { /* a fork that called no handler */
    if (!__atomic_compare_exchange_n(&phase, &now, NOT_YET, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      return started();
    now = NOT_YET;
  }
  if (now == NOT_YET &&
      __atomic_compare_exchange_n(&phase, &now, STARTING, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    int saved = errno;
    starting = 1;
    int failed = start();
    starting = 0;
    errno = saved;
    ncp_store(&phase, failed ? OFF : ON);
    return !failed;
  }
  if (starting) return 0; /* in a signal handler */
  for (int i = 0; i < 5000 && ncp_load(&phase) == STARTING; i++) usleep(1000);
  now = STARTING; /* still: by a thread that a fork left behind */
  __atomic_compare_exchange_n(&phase, &now, OFF, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return ncp_load(&phase) == ON;
}

static int is_gone(u32 tid, u32 mine) {
  if (tid == mine) return 1; /* the number is ours now */
  return syscall(SYS_tgkill, getpid(), tid, 0) != 0 && errno == ESRCH;
}

/* The slot held a thread that ended inside a call. */
static void close_call(struct ncp_thread *th) {
  th->rec->t_exit = ncp_now(th);
  th->rec->flags |= NCP_FLAG_NO_RETURN;
  ncp_emit(th);
  ncp_store(&th->slot->seq, ++th->seq);
}

static struct ncp_thread *take_slot(u32 tid) {
  for (u32 i = 0; i < NCP_SHM_SLOTS; i++) {
    struct ncp_shm_slot *slot = ncp_slot(i);
    u32 holder = ncp_load(&slot->tid);
    if (holder && !is_gone(holder, tid)) continue;
    if (!__atomic_compare_exchange_n(&slot->tid, &holder, tid, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      continue;
    struct ncp_thread *th = &ncp_state->threads[i];
    (void)ncp_load(&slot->seq); /* after all that the last holder wrote */
    u32 top = ncp_load(&ncp_shm->top);
    while (top <= i && !__atomic_compare_exchange_n(&ncp_shm->top, &top, i + 1, 0, __ATOMIC_ACQ_REL,
                                                    __ATOMIC_ACQUIRE)) {
    }
    if (!holder) {
      if (ncp_file_reserve(i)) {
        ncp_store(&slot->tid, 0u);
        return 0;
      }
      th->slot = slot;
      th->ring = th->rec = ncp_ring(i);
      th->cap = ncp_shm->ring_records;
    } else if (th->inside) {
      close_call(th);
    }
    return th;
  }
  return 0;
}

struct ncp_thread *ncp_thread_start(void) {
  if (likely(ncp_load(&phase) == OFF)) return 0;
  int saved = errno;
  struct ncp_thread *th = 0;
  if (started()) {
    if (refused) {
      refused--;
      ncp_add(&ncp_shm->lost, 1);
      return 0;
    }
    u32 tid = ncp_tid();
    th = take_slot(tid);
    if (th) {
      wait_for = 0;
      th->inside = 0;
      th->tid = tid;
      th->pid = ncp_shm->pid;
      th->time_off = ncp_shm->time_off;
      th->depth = 0;
      th->group_id = th->group_pos = 0;
      th->pending = 0;
      th->alive = 1;
      /* Denied meanwhile? The collector sets the file's word first, then the slots'. */
      if (__atomic_fetch_or(&ncp_shm->denied, 0, __ATOMIC_SEQ_CST)) ncp_store(&th->slot->denied, 1u);
      ncp_self = th;
    } else {
      ncp_add(&ncp_shm->lost, 1);
      wait_for = wait_for ? (wait_for < 4096 ? wait_for * 2 : wait_for) : 16;
      refused = wait_for;
    }
  }
  errno = saved;
  return th;
}
