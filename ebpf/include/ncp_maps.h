/* What the program keeps. All maps are preallocated and none evicts: an entry
 * dropped silently would restart a communicator's numbers. */
#ifndef NCP_MAPS_H
#define NCP_MAPS_H

#ifndef NCP_MAX_THREADS
#define NCP_MAX_THREADS 65536
#endif
#ifndef NCP_MAX_PROCS
#define NCP_MAX_PROCS 4096
#endif
#ifndef NCP_MAX_COMMS
#define NCP_MAX_COMMS 65536
#endif
#ifndef NCP_MAX_P2P
#define NCP_MAX_P2P 131072
#endif
#ifndef NCP_MAX_PENDING
#define NCP_MAX_PENDING 4096
#endif
#ifndef NCP_MAX_LIBS
#define NCP_MAX_LIBS 1024
#endif
#ifndef NCP_RING_PAGES
#define NCP_RING_PAGES 8192
#endif
/* Children of one thread whose handles are not written yet; a power of two. One
 * more than this replaces the oldest, which will then be seen late. */
#define NCP_PENDING_PER_THREAD 32
/* Devices of one ncclCommInitAll. */
#define NCP_MAX_INIT_ALL 64

/* A thread that has called NCCL. The call it is inside comes first: user space
 * reads it there. A call is inside when `active` is set. */
struct ncp_thread {
  struct ncp_record rec;
  u64 sp;       /* at the entry of that call */
  u64 ip;       /* its first instruction */
  u64 out;      /* where it will write new communicators */
  u64 name;     /* config.commName, 0: none */
  u64 aux;      /* the unique id that ncclCommInitAll is making */
  u64 captured; /* records of this thread put into the ring */
  u32 epoch;
  u32 version; /* of the list of denied processes, as last seen */
  u32 group_id;
  u16 group_pos;
  u16 pending; /* next slot in `pending`, 0: none in use */
  u16 kept;    /* one of them stays */
  u8 depth;    /* open groups */
  u8 active;
  u8 denied;
  u8 dups;        /* further attachments that saw the same call */
  u8 bcast_label; /* enter-only: an ncclBroadcast by ncclBcast follows */
  u8 zero;
};

/* nccluprobe/capture/state.py reads these places. */
_Static_assert(__builtin_offsetof(struct ncp_thread, captured) == NCP_RECORD_SIZE + 40, "captured");
_Static_assert(__builtin_offsetof(struct ncp_thread, epoch) == NCP_RECORD_SIZE + 48, "epoch");
_Static_assert(__builtin_offsetof(struct ncp_thread, active) == NCP_RECORD_SIZE + 67, "active");
_Static_assert(sizeof(struct ncp_thread) == NCP_RECORD_SIZE + 72, "thread");

/* A process by tgid. Epochs are unique: a reused pid, or the same one after an
 * exec, gets another. */
struct ncp_proc {
  u32 epoch;
  u32 leader_gone; /* its first thread has exited */
  u64 threads;     /* entries of `threads` */
};

/* What must outlive the process, by epoch; user space frees it. */
struct ncp_tally {
  u32 pid;
  u32 zero;
  u64 captured; /* by threads that are gone */
  u64 lost;
  u64 blind;
};

struct ncp_comm_key {
  u32 epoch;
  u32 zero;
  u64 ptr;
};
/* Besides the record's flags, in ncp_comm.flags: */
#define NCP_COMM_UNREAD 0x100 /* the struct is to be read at the next call */
#define NCP_COMM_SOUND 0x200  /* it was read and makes sense */
#define NCP_COMM_TRY 0x10000  /* counts calls at which it was not ready */
#define NCP_COMM_TRIES 64
struct ncp_comm {
  u32 gen;
  u32 flags; /* NCP_FLAG_COMM_LATE, NCP_COMM_* */
  u64 hash;  /* 0: not known here */
  u64 calls;
  u64 collectives;
  u64 children;
};

struct ncp_p2p_key {
  u32 epoch;
  u32 gen;
  s32 peer;
  u32 direction;
};

struct ncp_pending_key {
  u64 thread;
  u64 slot;
};
struct ncp_pending {
  struct ncp_record rec; /* what will be written */
  u64 out;
  char name[NCP_NAME_SIZE];
};

struct ncp_lib {
  u32 hash_form; /* NCP_HASH_* */
  u32 magics; /* whether NCP_MAGIC stands at the struct's start and at end_magic */
  /* Offsets in ncclComm; 0: unknown. */
  u64 rank; /* nRanks and cudaDev follow */
  u64 hash;
  u64 seq; /* five counters of eager collectives, by function */
  u64 end_magic;
  u64 spare[3];
};
#define NCP_MAGIC 0x0280028002800280ULL

struct ncp_globals {
  u64 next_gen;
  u64 next_epoch;
  u64 next_group;
};

enum {
  NCP_STAT_LOST,         /* records lost: the ring was full */
  NCP_STAT_THREAD_FULL,  /* calls not seen: no room for their thread */
  NCP_STAT_PROC_FULL,    /* calls not seen: no room for their process */
  NCP_STAT_COMM_FULL,    /* communicators without identity */
  NCP_STAT_P2P_FULL,     /* calls without p2p order */
  NCP_STAT_PENDING_FULL, /* children forgotten: they will be seen late */
  NCP_STAT_NESTED,       /* calls by NCCL itself inside a call */
  NCP_STAT_DUPLICATE,    /* a call seen again through another path of its file */
  NCP_STAT_UNWOUND,      /* calls left by longjmp */
  NCP_STAT_NO_ENTRY,     /* exits without an entry */
  NCP_STAT_NO_RETURN,    /* calls whose thread ended inside */
  NCP_STATS = 16,
};

BPF_TABLE("hash", u64, struct ncp_thread, threads, NCP_MAX_THREADS);
BPF_TABLE("hash", u32, struct ncp_proc, procs, NCP_MAX_PROCS);
BPF_TABLE("hash", u32, struct ncp_tally, tallies, NCP_MAX_PROCS);
BPF_TABLE("hash", u32, u32, denied, NCP_MAX_PROCS);
BPF_TABLE("hash", struct ncp_comm_key, struct ncp_comm, comms, NCP_MAX_COMMS);
BPF_TABLE("hash", struct ncp_p2p_key, u64, p2p, NCP_MAX_P2P);
BPF_TABLE("hash", struct ncp_pending_key, struct ncp_pending, pending, NCP_MAX_PENDING);
BPF_TABLE("array", u32, struct ncp_lib, libs, NCP_MAX_LIBS);
BPF_TABLE("array", u32, struct ncp_globals, globals, 1);
BPF_TABLE("array", u32, u32, deny_version, 1); /* grows when user space denies a process */
BPF_TABLE("array", u32, struct ncp_thread, blank, 1);
BPF_TABLE("percpu_array", u32, u64, stats, NCP_STATS);
BPF_RINGBUF_OUTPUT(ring, NCP_RING_PAGES);

#endif
