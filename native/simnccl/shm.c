/* The shared-memory segment that joins the ranks of one communicator.
 *
 * /dev/shm/simnccl-<key>. Liveness is left to the kernel: every member holds an
 * open-file-description lock on byte LIVE+rank, which ends with the process
 * however it dies. Byte 0 is the mutex of joining and leaving. When all ranks have
 * joined, the name goes: nothing is left of them, also when all are killed. Before, who
 * leaves (also by exit) and finds no other lock removes it; files whose holders were
 * killed until then are removed by simCleanup, which a process runs before its first
 * unique id.
 * The bytes that calls move pass behind the segment in the same file (data.c). */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

#define PREFIX "simnccl-"
#define LIVE 16

static struct sim_shm *g_segments; /* open ones of this process; under the lock */

static int range_lock(int fd, short type, off_t start, off_t len, int cmd) {
  struct flock fl = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = len};
  int rc;
  do rc = fcntl(fd, cmd, &fl);
  while (rc < 0 && errno == EINTR);
  if (rc < 0) return -1;
  return cmd == F_OFD_GETLK ? fl.l_type != F_UNLCK : 0;
}

static bool others_alive(int fd) { return range_lock(fd, F_WRLCK, LIVE, 0, F_OFD_GETLK) != 0; }

static void set_up(struct sim_shm *s) {
  s->pairs = (struct sim_pair *)(void *)&s->seg->ranks[s->nranks];
}

/* Opens the file with its mutex held; the file is surely still linked. */
static int open_locked(const char *name) {
  for (;;) {
    int fd = shm_open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return -1;
    struct stat st;
    if (range_lock(fd, F_WRLCK, 0, 1, F_OFD_SETLKW) == 0 && fstat(fd, &st) == 0 && st.st_nlink > 0)
      return fd;
    close(fd);
  }
}

static ncclResult_t map_and_enter(struct sim_shm *s) {
  struct stat st;
  if (fstat(s->fd, &st) < 0) return sim_fail(ncclSystemError, "fstat: %s", strerror(errno));
  if (st.st_size == 0 && ftruncate(s->fd, (off_t)s->size) < 0)
    return sim_fail(ncclSystemError, "ftruncate: %s", strerror(errno));
  uint32_t theirs; /* the segment's first word; behind the segment bytes may lie */
  if (st.st_size != 0 && (pread(s->fd, &theirs, sizeof theirs, 0) != (ssize_t)sizeof theirs ||
                          (theirs != 0 && theirs != (uint32_t)s->nranks)))
    return sim_fail(ncclInvalidUsage, "the ranks disagree on the number of ranks");
  /* Through a description of its own: a mapping inherited by fork would keep the locks. */
  int map_fd = shm_open(s->name, O_RDWR | O_CLOEXEC, 0);
  s->seg = mmap(NULL, s->size, PROT_READ | PROT_WRITE, MAP_SHARED, map_fd, 0);
  if (map_fd >= 0) close(map_fd);
  if (s->seg == MAP_FAILED) {
    s->seg = NULL;
    return sim_fail(ncclSystemError, "mmap: %s", strerror(errno));
  }
  set_up(s);
  atomic_store(&s->seg->nranks, (uint32_t)s->nranks);
  if (atomic_exchange(&s->seg->ranks[s->rank].joined, 1)) {
    s->conflict = true; /* as the real one: a message, then a wait without end */
    fprintf(stderr, "simnccl WARN Bootstrap Root : rank %d of %d ranks has already checked in\n",
            s->rank, s->nranks);
  } else {
    range_lock(s->fd, F_WRLCK, LIVE + s->rank, 1, F_OFD_SETLK);
    if (atomic_fetch_add(&s->seg->joined, 1) + 1 == (uint32_t)s->nranks) shm_unlink(s->name);
  }
  return ncclSuccess;
}

ncclResult_t sim_shm_join(uint64_t key, int nranks, int rank, struct sim_shm **out) {
  struct sim_shm *s = calloc(1, sizeof *s);
  size_t n = (size_t)nranks;
  *s = (struct sim_shm){.fd = -1, .data_fd = -1, .nranks = nranks, .rank = rank, .refs = 1};
  s->size = sizeof(struct sim_seg) + n * sizeof(struct sim_rank) + n * n * sizeof(struct sim_pair);
  ncclResult_t rc = ncclSuccess;
  if (nranks == 1) { /* nobody to meet: private memory of the same shape */
    s->seg = calloc(1, s->size);
    set_up(s);
    atomic_store(&s->seg->nranks, 1);
    atomic_store(&s->seg->joined, 1);
  } else {
    snprintf(s->name, sizeof s->name, "/" PREFIX "%016llx", (unsigned long long)key);
    s->fd = open_locked(s->name);
    rc = s->fd < 0 ? sim_fail(ncclSystemError, "shm_open: %s", strerror(errno)) : map_and_enter(s);
    if (s->fd >= 0) range_lock(s->fd, F_UNLCK, 0, 1, F_OFD_SETLK);
  }
  if (rc != ncclSuccess) {
    if (s->fd >= 0) close(s->fd);
    free(s);
    return rc;
  }
  s->next = g_segments;
  g_segments = s;
  sim_ring(s);
  *out = s;
  return ncclSuccess;
}

void sim_shm_unref(struct sim_shm *s) {
  if (--s->refs > 0) return;
  for (struct sim_shm **p = &g_segments; *p; p = &(*p)->next)
    if (*p == s) {
      *p = s->next;
      break;
    }
  if (s->data_fd >= 0) close(s->data_fd);
  if (s->nranks == 1) free(s->seg);
  else munmap(s->seg, s->size);
  free(s);
}

/* Gives up this rank's liveness; the last one removes the file. */
static void release(struct sim_shm *s) {
  if (s->fd < 0) return;
  range_lock(s->fd, F_WRLCK, 0, 1, F_OFD_SETLKW);
  if (!s->conflict) range_lock(s->fd, F_UNLCK, LIVE + s->rank, 1, F_OFD_SETLK);
  struct stat st;
  if (!others_alive(s->fd) && fstat(s->fd, &st) == 0 && st.st_nlink > 0) shm_unlink(s->name);
  close(s->fd); /* drops the mutex too */
  s->fd = -1;
}

void sim_shm_leave(struct sim_shm *s) {
  if (s->left) return;
  s->left = true;
  sim_ring(s);
  release(s);
  sim_shm_unref(s);
}

/* A program that ends without destroying its communicators. */
__attribute__((destructor)) static void leave_all(void) {
  sim_lock();
  for (struct sim_shm *s = g_segments; s; s = s->next) release(s);
  sim_unlock();
}

/* A forked child must not keep the parent's liveness locks. */
void sim_shm_after_fork(void) {
  for (struct sim_shm *s = g_segments; s; s = s->next) {
    if (s->fd >= 0) close(s->fd);
    if (s->data_fd >= 0) close(s->data_fd);
    s->fd = s->data_fd = -1;
  }
}

/* One rank has no file to share, but may send to itself. */
int sim_shm_data(struct sim_shm *s) {
  if (s->nranks > 1) return s->fd;
  if (s->data_fd < 0) s->data_fd = memfd_create("simnccl", MFD_CLOEXEC);
  return s->data_fd;
}

int simCleanup(void) {
  DIR *dir = opendir("/dev/shm");
  if (!dir) return 0;
  int removed = 0;
  for (struct dirent *e; (e = readdir(dir));) {
    if (strncmp(e->d_name, PREFIX, strlen(PREFIX)) != 0) continue;
    char name[300];
    snprintf(name, sizeof name, "/%s", e->d_name);
    int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) continue;
    struct stat st;
    if (range_lock(fd, F_WRLCK, 0, 1, F_OFD_SETLK) == 0 && !others_alive(fd) &&
        fstat(fd, &st) == 0 && st.st_nlink > 0 && shm_unlink(name) == 0)
      removed++;
    close(fd);
  }
  closedir(dir);
  return removed;
}

void sim_futex_wait(_Atomic uint32_t *word, uint32_t seen, unsigned usec) {
  struct timespec ts = {usec / 1000000, (long)(usec % 1000000) * 1000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &ts, NULL, 0);
}

void sim_futex_wake(_Atomic uint32_t *word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void sim_ring(struct sim_shm *s) {
  atomic_fetch_add(&s->seg->bell, 1);
  if (atomic_load(&s->seg->waiters)) sim_futex_wake(&s->seg->bell);
}

void sim_wait(struct sim_shm *s, unsigned usec) {
  if (!s) { /* the driver stand-in's own work: nothing rings */
    sim_unlock();
    struct timespec ts = {0, 50000};
    nanosleep(&ts, NULL);
    sim_lock();
    return;
  }
  uint32_t seen = s->seen;
  s->refs++;
  atomic_fetch_add(&s->seg->waiters, 1);
  sim_unlock();
  for (int i = 0; i < 40 && atomic_load(&s->seg->bell) == seen; i++) /* a few microseconds */
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
  if (atomic_load(&s->seg->bell) == seen) sim_futex_wait(&s->seg->bell, seen, usec);
  sim_lock();
  atomic_fetch_sub(&s->seg->waiters, 1);
  sim_shm_unref(s);
}
