/* NCCL's communicator hashes as plain arithmetic.
 *
 * Freestanding C without libc: the BPF program, the preload library and the
 * CPU stand-in include this one file. All loops have constant bounds. */
#ifndef NCP_HASH_H
#define NCP_HASH_H

typedef unsigned long long ncp_u64;
typedef unsigned int ncp_u32;

#define NCP_UNIQUE_ID_BYTES 128

/* NCCL's old hashes add a C `char`: signed on x86-64, unsigned on aarch64. */
#if defined(__aarch64__) || defined(__TARGET_ARCH_arm64)
#define NCP_HASH_CHAR(b) ((ncp_u64)(b))
#else
#define NCP_HASH_CHAR(b) ((ncp_u64)(long long)(signed char)(b))
#endif

struct ncp_hash_acc {
  ncp_u64 p, q;
};

static inline void ncp_hash_word(struct ncp_hash_acc *a, ncp_u64 w) {
  a->p += a->q;
  a->q ^= a->p;
  a->p ^= a->p >> 31;
  a->p *= 0x9de62bbc8cef3ce3ULL;
  a->q ^= a->q >> 32;
  a->q *= 0x485cd6311b599e79ULL;
  a->p += w;
}

static inline ncp_u64 ncp_hash_digest(const struct ncp_hash_acc *a) {
  ncp_u64 h = a->p;
  h ^= h >> 31;
  h *= 0xbac3bd562846de6bULL;
  h += a->q;
  h ^= h >> 32;
  h *= 0x995a187a14e7b445ULL;
  return h;
}

/* 2.26 and later: commHash of a communicator made from a unique id. */
static inline ncp_u64 ncp_hash_226(const unsigned char id[NCP_UNIQUE_ID_BYTES]) {
  struct ncp_hash_acc a = {1 ^ NCP_UNIQUE_ID_BYTES, 1};
  for (int i = 0; i < NCP_UNIQUE_ID_BYTES; i += 8) {
    ncp_u64 w = 0;
    for (int j = 7; j >= 0; j--) w = (w << 8) | id[i + j];
    ncp_hash_word(&a, w);
  }
  return ncp_hash_digest(&a);
}

/* 2.26 and later: split child (count starts at 1); shrink is count 0, colour 0. */
static inline ncp_u64 ncp_hash_226_child(ncp_u64 parent, ncp_u32 count, ncp_u32 colour) {
  struct ncp_hash_acc a = {1, 1};
  a.p ^= 8;
  ncp_hash_word(&a, parent);
  a.p ^= 4;
  ncp_hash_word(&a, count);
  a.p ^= 4;
  ncp_hash_word(&a, colour);
  return ncp_hash_digest(&a);
}

/* 2.18 to 2.25: commHash (DJB2a). */
static inline ncp_u64 ncp_hash_djb2a(const unsigned char *id) {
  ncp_u64 h = 5381;
  for (int i = 0; i < NCP_UNIQUE_ID_BYTES; i++) h = (h * 33) ^ NCP_HASH_CHAR(id[i]);
  return h;
}

/* Up to 2.25: the commId that NCCL's log prints. */
static inline ncp_u64 ncp_hash_uniqueid(const unsigned char *id) {
  ncp_u64 h = 0xdeadbeefULL;
  for (int i = 0; i < NCP_UNIQUE_ID_BYTES; i++) {
    h ^= h >> 32;
    h *= 0x8db3db47fa2994adULL;
    h += NCP_HASH_CHAR(id[i]);
  }
  return h;
}

#endif
