/* Makes the file in which a process's records are, and reserves room in it.
 *
 * Every page is allocated before it is written to, so that a full file system is
 * an error here and never a SIGBUS in the job. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#define PAGE 4096ULL
#define ROUND(n) (((n) + PAGE - 1) & ~(PAGE - 1))
#define DEFAULT_KIB 1024
#define LEAST_KIB 64

/* From the environment, as the program was started: read by the constructor, as
 * getenv is not safe beside setenv. */
static char folder[NCP_SHM_PATH];
static u64 ring_kib = DEFAULT_KIB;
static int disabled;
static char launcher[NCP_SHM_ENVIRON];

static char path[NCP_SHM_PATH + 64];
static struct ncp_stat made;

static size_t append(char *to, size_t size, size_t at, const char *from) {
  while (*from && at + 1 < size) to[at++] = *from++;
  to[at] = 0;
  return at;
}

static size_t append_number(char *to, size_t size, size_t at, u64 n) {
  char digits[24];
  int i = sizeof(digits) - 1;
  digits[i] = 0;
  do digits[--i] = (char)('0' + n % 10);
  while (n /= 10);
  return append(to, size, at, digits + i);
}

__attribute__((constructor)) static void read_environment(void) {
  const char *off = getenv("NCCLUPROBE_PRELOAD"), *dir = getenv("NCCLUPROBE_PRELOAD_DIR");
  const char *kib = getenv("NCCLUPROBE_PRELOAD_RING_KB");
  disabled = (off && off[0] == '0') || getauxval(AT_SECURE);
  if (dir && dir[0] == '/') {
    append(folder, sizeof(folder), 0, dir);
  } else {
    size_t n = append(folder, sizeof(folder), 0, "/dev/shm/nccluprobe-");
    append_number(folder, sizeof(folder), n, getuid());
  }
  if (kib) {
    u64 wanted = ncp_number(&kib);
    if (wanted >= LEAST_KIB && wanted <= 65536) ring_kib = wanted;
  }
  size_t at = 0;
  for (const char *const *name = ncp_launcher_names; *name; name++) {
    const char *value = getenv(*name);
    if (!value || at + strlen(*name) + strlen(value) + 3 > sizeof(launcher)) continue;
    at = append(launcher, sizeof(launcher), at, *name);
    at = append(launcher, sizeof(launcher), at, "=");
    at = append(launcher, sizeof(launcher), at, value) + 1;
  }
}

int ncp_file_disabled(void) { return disabled; }

static u64 start_ticks(const char *stat) {
  char text[1024];
  if (ncp_read_file(stat, text, sizeof(text)) <= 0) return 0;
  const char *at = strrchr(text, ')');
  if (!at) return 0;
  for (int field = 2; field < 22 && *at; at++)
    if (*at == ' ') field++;
  return ncp_number(&at);
}

/* attach leaves a note about each process that it traces: our start time, and
 * its own number and start time. See nccluprobe/capture/preload_marks.py. */
int ncp_other_front(void) {
  char name[64], text[128];
  size_t n = append(name, sizeof(name), 0, "/run/nccluprobe/ebpf/");
  append_number(name, sizeof(name), n, (u64)getpid());
  if (ncp_read_file(name, text, sizeof(text)) <= 0) return 0;
  const char *at = text;
  u64 ours = ncp_number(&at), tracer = ncp_number(&at), ticks = ncp_number(&at);
  if (!ours || ours != start_ticks("/proc/self/stat")) return 0;
  n = append(name, sizeof(name), 0, "/proc/");
  n = append_number(name, sizeof(name), n, tracer);
  append(name, sizeof(name), n, "/stat");
  if (!ticks || ticks != start_ticks(name)) return 0;
  ncp_say("attach", "it traces this process already");
  return 1;
}

/* Seconds and nanoseconds that a time namespace adds to a clock, as ns. */
static long long offset_of(const char *text, const char *clock) {
  const char *at = strstr(text, clock);
  if (!at) return 0;
  at += strlen(clock);
  while (*at == ' ' || *at == '\t') at++;
  int negative = *at == '-';
  if (negative) at++;
  long long seconds = (long long)ncp_number(&at);
  long long ns = (long long)ncp_number(&at);
  return (negative ? -seconds : seconds) * 1000000000LL + ns;
}

static void describe(struct ncp_shm *h) {
  char text[256];
  h->version = NCP_SHM_VERSION;
  h->record_version = NCP_RECORD_VERSION;
  h->record_size = NCP_RECORD_SIZE;
  h->pid = (u32)getpid();
  h->uid = geteuid();
  h->gid = getegid();
  h->start_ticks = start_ticks("/proc/self/stat");
  ncp_read_file("/proc/self/timens_offsets", text, sizeof(text));
  h->time_off = -offset_of(text, "monotonic");
  if (h->start_ticks)
    h->start_ticks -= (u64)(offset_of(text, "boottime") / (1000000000LL / sysconf(_SC_CLK_TCK)));
  h->born = ncp_now_raw() + (u64)h->time_off;
  if (ncp_read_file("/proc/sys/kernel/random/boot_id", text, sizeof(text)) > 0) {
    text[strcspn(text, "\n")] = 0;
    append(h->boot_id, sizeof(h->boot_id), 0, text);
  }
  ssize_t n = readlink("/proc/self/exe", text, sizeof(text) - 1);
  if (n > 0) {
    text[n] = 0;
    const char *name = strrchr(text, '/');
    append(h->exe, sizeof(h->exe), 0, name ? name + 1 : text);
  }
  struct utsname host;
  if (!uname(&host)) append(h->host, sizeof(h->host), 0, host.nodename);
  memcpy(h->environ, launcher, sizeof(launcher));
}

/* Room for `bytes` more leaves most of the file system to others: NCCL itself
 * needs /dev/shm. */
static int has_room(int fd, u64 bytes) {
  struct statfs fs;
  if (fstatfs(fd, &fs)) return 1;
  return (u64)fs.f_bavail * (u64)fs.f_bsize >= bytes * 4;
}

static int allocate(int fd, u64 at, u64 bytes) {
  if (!has_room(fd, bytes)) {
    errno = ENOSPC;
    return -1;
  }
  errno = posix_fallocate(fd, (off_t)at, (off_t)bytes);
  return errno ? -1 : 0;
}

static int open_folder(void) {
  struct ncp_stat st;
  int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
  int fd = open(folder, flags);
  if (fd < 0 && errno == ENOENT) {
    if (mkdir(folder, 0700) && errno != EEXIST) return -1;
    fd = open(folder, flags);
  }
  if (fd < 0) return -1;
  /* A stranger's folder, or one in which strangers may rename files. */
  if (ncp_stat_fd(fd, &st) || (st.uid != geteuid() && st.uid != 0) ||
      ((st.mode & 022) && !(st.mode & S_ISVTX))) {
    close(fd);
    errno = EPERM;
    return -1;
  }
  return fd;
}

static int create(int dir) {
  size_t slash = append(path, sizeof(path), 0, folder);
  slash = append(path, sizeof(path), slash, "/");
  for (u64 i = 0; i < 16; i++) {
    size_t n = append_number(path, sizeof(path), slash, (u64)getpid());
    n = append(path, sizeof(path), n, ".");
    n = append_number(path, sizeof(path), n, ncp_now_raw() + i);
    append(path, sizeof(path), n, ".ring");
    int fd = openat(dir, path + slash, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd >= 0 || errno != EEXIST) return fd;
  }
  return -1;
}

static struct ncp_shm *layout(int fd, u64 bytes) {
  u64 births = NCP_SHM_HEADER_SIZE + NCP_SHM_SLOTS * NCP_SHM_SLOT_SIZE;
  u64 rings = ROUND(births + NCP_SHM_BIRTHS * sizeof(struct ncp_shm_birth));
  u64 size = rings + NCP_SHM_SLOTS * bytes;
  if (ftruncate(fd, (off_t)size) || allocate(fd, 0, rings) || ncp_stat_fd(fd, &made)) return 0;
  struct ncp_shm *h = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (h == MAP_FAILED) return 0;
  madvise(h, size, MADV_DONTDUMP);
  describe(h);
  h->slots = NCP_SHM_SLOTS;
  h->slots_at = NCP_SHM_HEADER_SIZE;
  h->births_at = births;
  h->births = NCP_SHM_BIRTHS;
  h->rings_at = rings;
  h->ring_bytes = bytes;
  h->ring_records = (u32)(bytes / NCP_RECORD_SIZE);
  h->file_size = size;
  return h;
}

int ncp_file_make(const char **what) {
  u64 bytes = ROUND(ring_kib << 10);
  *what = folder;
  errno = 0;
  int dir = open_folder();
  if (dir < 0) return -1;
  int fd = create(dir);
  struct ncp_shm *h = 0;
  if (fd >= 0) {
    while (bytes > LEAST_KIB << 10 && !has_room(fd, bytes)) bytes = ROUND(bytes / 4);
    h = layout(fd, bytes);
    int error = errno;
    if (!h) unlinkat(dir, strrchr(path, '/') + 1, 0);
    close(fd);
    errno = error;
  }
  int error = errno;
  close(dir);
  errno = error;
  if (!h) return -1;
  ncp_shm = h;
  if (ncp_file_reserve(0)) {
    error = errno;
    unlink(path);
    munmap(h, h->file_size);
    ncp_shm = 0;
    errno = error;
    return -1;
  }
  u64 magic;
  memcpy(&magic, NCP_SHM_MAGIC, 8);
  ncp_store((u64 *)(void *)h->magic, magic);
  return 0;
}

/* What a collector has found out about this file of NCCL before. */
void ncp_file_layout(struct ncp_shm_copy *copy, u64 size) {
  char name[NCP_SHM_PATH + 96], text[160];
  size_t n = append(name, sizeof(name), 0, folder);
  const u64 key[] = {copy->dev, copy->ino, size};
  n = append(name, sizeof(name), n, "/nccl");
  for (int i = 0; i < 3; i++) {
    n = append(name, sizeof(name), n, "-");
    n = append_number(name, sizeof(name), n, key[i]);
  }
  append(name, sizeof(name), n, ".layout");
  if (ncp_read_file(name, text, sizeof(text)) <= 0) return;
  const char *at = text;
  copy->magics = ncp_number(&at);
  copy->rank_at = ncp_number(&at);
  copy->hash_at = ncp_number(&at);
  copy->seq_at = ncp_number(&at);
  copy->end_magic_at = ncp_number(&at);
}

/* Room for a slot's ring. The file is opened anew, as a descriptor kept in the
 * job could be closed by it and be something else's by now. */
int ncp_file_reserve(u32 slot) {
  struct ncp_stat st;
  int fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return -1;
  int failed = ncp_stat_fd(fd, &st) || st.ino != made.ino || st.dev != made.dev;
  if (!failed) failed = allocate(fd, ncp_shm->rings_at + slot * ncp_shm->ring_bytes, ncp_shm->ring_bytes);
  int error = errno;
  close(fd);
  errno = error;
  return failed ? -1 : 0;
}
