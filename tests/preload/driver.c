/* Calls NCCL from many threads, with what the preload library must bear at once:
 * groups, children, sends, new communicators, forks. For the sanitizer builds,
 * into which the library is compiled, and for the soak.
 *
 *   driver THREADS STEPS [fork]     prints the number of calls made */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct {
  char b[128];
} uid_s;
typedef void *comm_t;
int ncclAllReduce(const void *, void *, size_t, int, int, comm_t, void *);
int ncclBroadcast(const void *, void *, size_t, int, int, comm_t, void *);
int ncclSend(const void *, size_t, int, int, comm_t, void *);
int ncclRecv(void *, size_t, int, int, comm_t, void *);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclCommInitRank(comm_t *, int, uid_s, int);
int ncclCommSplit(comm_t, int, int, comm_t *, void *);
int ncclCommDestroy(comm_t);

static long steps;
static atomic_long made;
static comm_t shared = (comm_t)0x7000;

static void *work(void *arg) {
  long n = (long)(size_t)arg, calls = 0;
  comm_t own = (comm_t)(0x100000 + n * 0x1000), child = 0;
  for (long i = 0; i < steps; i++) {
    ncclAllReduce(0, 0, (size_t)i, 7, 0, own, 0);
    calls++;
    if (i % 16 == 0) {
      ncclAllReduce(0, 0, (size_t)i, 7, 0, shared, 0);
      ncclGroupStart();
      ncclSend(0, 1, 7, (int)(i % 7), own, 0);
      ncclRecv(0, 1, 7, (int)(i % 5), shared, 0);
      ncclGroupEnd();
      calls += 5;
    }
    if (i % 1024 == 0) {
      uid_s id = {{(char)n}};
      ncclCommInitRank(&child, 1, id, 0);
      ncclCommSplit(own, (int)i, 0, &child, 0);
      ncclBroadcast(0, 0, 1, 7, 0, child, 0);
      ncclCommDestroy(child);
      calls += 4;
    }
  }
  atomic_fetch_add(&made, calls);
  return 0;
}

int main(int argc, char **argv) {
  long threads = argc > 1 ? atol(argv[1]) : 4;
  int forks = argc > 3;
  pthread_t t[64];
  steps = argc > 2 ? atol(argv[2]) : 1000;
  for (long round = 0; round < (forks ? 3 : 1); round++) {
    for (long i = 0; i < threads; i++) pthread_create(&t[i], 0, work, (void *)(size_t)i);
    for (int i = 0; forks && i < 4; i++) {
      pid_t child = fork();
      if (child == 0) {
        steps = 3;
        work((void *)40);
        _exit(0);
      }
      waitpid(child, 0, 0);
    }
    for (long i = 0; i < threads; i++) pthread_join(t[i], 0);
  }
  printf("%ld\n", atomic_load(&made));
  return 0;
}
