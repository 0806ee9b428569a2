/* nccluprobe: what every thread calls of NCCL, and when.
 *
 * Compiled by BCC against the stub headers in include/: it uses BPF helpers and
 * the registers of the traced thread, never a kernel structure. The loader puts
 * the quoted includes into one text, because BCC rewrites only the main file.
 *
 * ncp_enter and ncp_exit run at the entry and the return of each function of
 * the API table; their cookie says which function of which library. One record
 * per call goes into the ring, at its exit. The call that a thread is inside
 * is in `threads`, where user space reads it. */
#define NCP_BPF 1

#include <asm/ptrace.h>
#include <linux/types.h>

#include "ncp_record.h"

#include "ncp_arch.h"

#include "ncp_api.h"

#include "ncp_hash_bpf.h"

#include "ncp_maps.h"

#include "ncp_state.h"

#include "ncp_comm.h"

#include "ncp_group.h"

#include "ncp_enter.h"

#include "ncp_exit.h"

#include "ncp_sched.h"
