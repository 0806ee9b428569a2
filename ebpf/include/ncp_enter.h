/* Entry of a traced function. */
#ifndef NCP_ENTER_H
#define NCP_ENTER_H

#define NCP_COOKIE_API(cookie) ((u32)(cookie)&0xffff)
#define NCP_COOKIE_LIB(cookie) ((u32)((cookie) >> 16) & 0xffff)

static u64 (*ncp_cookie)(void *ctx) = (void *)174; /* bpf_get_attach_cookie */

/* What an entry is when the thread is already inside a call. */
#define NCP_NESTED 1    /* made by NCCL itself: not a call of the program */
#define NCP_DUPLICATE 2 /* the same entry, through another attachment */
#define NCP_UNWOUND 3   /* a new call: the earlier one was left by longjmp */

#if defined(__x86_64__)
/* While a call with a return probe is inside, its return address is that of
 * the kernel's trampoline: in the last pages that a process can have, with page
 * tables of four or of five levels. */
#define NCP_LAST_PAGES 0x10000ULL
#define ncp_is_trampoline(a)                                  \
  ((1ULL << 47) - (a) - 1 < NCP_LAST_PAGES || (1ULL << 56) - (a) - 1 < NCP_LAST_PAGES)
#endif

/* Calls that NCCL is not known to make inside another of them. */
static __always_inline int ncp_outermost(u32 class) {
  return class == NCP_CLASS_COLLECTIVE || class == NCP_CLASS_P2P || class == NCP_CLASS_GROUP ||
         class == NCP_CLASS_ONE_SIDED;
}

static __always_inline int ncp_inside(struct pt_regs *ctx, struct ncp_thread *th, u32 api,
                                      u32 lib) {
  u64 sp = ncp_sp(ctx);
  if (sp > th->sp) return NCP_UNWOUND;
  if (sp == th->sp) {
    if (api == th->rec.api && lib != th->rec.lib && ncp_ip(ctx) == th->ip) return NCP_DUPLICATE;
#if !defined(__x86_64__)
    /* A tail call leaves the stack pointer as it was. */
    if (th->rec.api == NCP_API_BCAST && api == NCP_API_BROADCAST) return NCP_NESTED;
#endif
    return NCP_UNWOUND;
  }
#if defined(__x86_64__)
  /* Deeper than a call that may be long gone: where NCCL is not known to nest,
   * look whether it still waits for its return. A dead one is found out as soon
   * as the program has used that part of its stack for something else. */
  if (th->rec.api != NCP_API_BCAST && ncp_outermost(ncp_api_class(api)) &&
      ncp_outermost(ncp_api_class(th->rec.api))) {
    u64 back = 0;
    bpf_probe_read_user(&back, sizeof(back), (void *)th->sp);
    if (!ncp_is_trampoline(back)) return NCP_UNWOUND;
  }
#endif
  return NCP_NESTED;
}

/* Hashes a unique id; the id itself stays on this stack. */
static __always_inline void ncp_hash_uid(struct ncp_record *r, u64 at) {
  u32 id = r->lib;
  struct ncp_lib *lib = libs.lookup(&id);
  u64 uid[NCP_UID_WORDS];
  if (!lib || !at || bpf_probe_read_user(uid, sizeof(uid), (void *)at)) return;
  if (lib->hash_form == NCP_HASH_226) {
    r->uid_hash = ncp_hash_new(uid);
  } else if (lib->hash_form == NCP_HASH_217 || lib->hash_form == NCP_HASH_218) {
    u64 hash, log;
    ncp_hash_old(uid, &hash, &log);
    r->uid_hash = lib->hash_form == NCP_HASH_218 ? hash : log;
    if (lib->hash_form == NCP_HASH_218) r->log_hash = log;
  }
}

/* The head of ncclConfig_t: the same in all versions as far as it is there. */
struct ncp_config {
  u64 size;
  u32 magic, version;
  s32 blocking;
  s32 others[3];
  u64 net_name;
  s32 more[2];
  u64 comm_name; /* from 2.27 */
};

static __always_inline void ncp_read_config(struct ncp_thread *th, u64 at) {
  struct ncp_config c;
  if (!at || bpf_probe_read_user(&c, 32, (void *)at)) return;
  if (c.magic != 0xcafebeef || c.size < 20) return;
  if (c.blocking == 0) th->rec.flags |= NCP_FLAG_NONBLOCKING;
  u64 name = 0;
  if (c.size >= 56 && !bpf_probe_read_user(&name, 8, (void *)at + 48)) th->name = name;
}

int ncp_enter(struct pt_regs *ctx) {
  u64 now = bpf_ktime_get_ns();
  u64 cookie = ncp_cookie(ctx), key = bpf_get_current_pid_tgid();
  u32 api = NCP_COOKIE_API(cookie), lib = NCP_COOKIE_LIB(cookie);
  struct ncp_globals *g = ncp_globals();
  struct ncp_thread *th = threads.lookup(&key);
  if (!g) return 0;
  if (!th) th = ncp_thread_new(g, key);
  if (!th) return 0;
  u32 version = ncp_version();
  if (th->version != version) ncp_check_denied(th, version);
  if (th->denied) return 0;

  if (th->active) {
    int what = ncp_inside(ctx, th, api, lib);
    if (what == NCP_NESTED) {
      if (api == NCP_API_GET_UNIQUE_ID) th->aux = ncp_arg0(ctx);
      ncp_count(NCP_STAT_NESTED);
      return 0;
    }
    if (what == NCP_DUPLICATE) {
      th->dups++;
      ncp_count(NCP_STAT_DUPLICATE);
      return 0;
    }
    th->active = 0;
    th->rec.t_exit = now;
    th->rec.flags |= NCP_FLAG_UNWOUND;
    ncp_count(NCP_STAT_UNWOUND);
    ncp_emit(th);
  }
  if (api == NCP_API_GET_UNIQUE_ID) return 0; /* tells something only inside another call */

  struct ncp_record *r = &th->rec;
  struct ncp_args args = {};
  __builtin_memset(r, 0, sizeof(*r));
  r->t_enter = now;
  r->nccl_seq = NCP_UNKNOWN_SEQ;
  r->pid = key >> 32;
  r->tid = (u32)key;
  r->epoch = th->epoch;
  r->api = api;
  r->lib = lib;
  r->kind = NCP_KIND_CALL;
  ncp_read_args(ctx, api, r, &args);
  /* Read back: else the verifier follows every api through all that comes. */
  api = *(volatile unsigned short *)&r->api;
  u32 class = ncp_api_class(api);
  ncp_keep(class);
#ifdef NCP_ENTER_ONLY
  /* ncclBcast calls ncclBroadcast at once: the same call again. */
  int again = api == NCP_API_BROADCAST && th->bcast_label && th->aux == r->comm;
  th->bcast_label = api == NCP_API_BCAST;
  th->aux = r->comm;
  if (again) {
    ncp_count(NCP_STAT_NESTED);
    return 0;
  }
#endif
  ncp_group(th, r, &g->next_group, api, class);
  if (r->comm) ncp_number(g, th, key, api, class);
  if (class == NCP_CLASS_LIFECYCLE) {
    th->out = args.out;
    th->name = 0;
    th->aux = 0;
    if (ncp_api_init_uid(api)) ncp_hash_uid(r, args.uid);
    ncp_read_config(th, args.config);
  }
#ifdef NCP_ENTER_ONLY
  r->flags |= NCP_FLAG_ENTER_ONLY;
  ncp_emit(th);
#else
  th->sp = ncp_sp(ctx);
  th->ip = ncp_ip(ctx);
  th->dups = 0;
  asm volatile("" ::: "memory");
  th->active = 1;
#endif
  return 0;
}

#endif
