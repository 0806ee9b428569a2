/* NCCL's communicator hashes over the 128 bytes of a unique id, for the
 * verifier: constant bounds, no pointer arithmetic but by a known index.
 * native/include/ncp_hash.h has the same arithmetic for plain C. */
#ifndef NCP_HASH_BPF_H
#define NCP_HASH_BPF_H

#define NCP_UID_WORDS 16

/* Which hash a library uses (lib.hash_form). */
#define NCP_HASH_NONE 0
#define NCP_HASH_217 1 /* up to 2.17: the log's commId only */
#define NCP_HASH_218 2 /* 2.18 to 2.25: DJB2a, and another in the log */
#define NCP_HASH_226 3 /* from 2.26: one hash for both */

/* The old hashes add a C `char`: signed on x86-64, unsigned on aarch64. */
#if defined(__aarch64__)
#define ncp_char(b) ((u64)(b))
#else
#define ncp_char(b) ((u64)(s64)(s8)(b))
#endif

/* 2.26 and later. */
static __always_inline u64 ncp_hash_new(const u64 *id) {
  u64 p = 1 ^ 128, q = 1;
  for (int i = 0; i < NCP_UID_WORDS; i++) {
    p += q;
    q ^= p;
    p ^= p >> 31;
    p *= 0x9de62bbc8cef3ce3ULL;
    q ^= q >> 32;
    q *= 0x485cd6311b599e79ULL;
    p += id[i];
  }
  u64 h = p;
  h ^= h >> 31;
  h *= 0xbac3bd562846de6bULL;
  h += q;
  h ^= h >> 32;
  h *= 0x995a187a14e7b445ULL;
  return h;
}

/* Both hashes of 2.25 and before: commHash, and the commId of the log. */
static __always_inline void ncp_hash_old(const u64 *id, u64 *hash, u64 *log) {
  u64 d = 5381, u = 0xdeadbeefULL;
  for (int i = 0; i < NCP_UID_WORDS; i++) {
    u64 w = id[i];
    for (int j = 0; j < 8; j++) {
      u64 c = ncp_char(w & 0xff);
      w >>= 8;
      d = (d * 33) ^ c;
      u ^= u >> 32;
      u *= 0x8db3db47fa2994adULL;
      u += c;
    }
  }
  *hash = d;
  *log = u;
}

#endif
