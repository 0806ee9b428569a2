/* Collectives. AlltoAll, Gather and Scatter are sends and receives inside, as in NCCL. */
#include <stdlib.h>

#include "sim.h"

static uint64_t signature(int fn, size_t count, ncclDataType_t type, int op, int root) {
  uint64_t h = (uint64_t)fn + 1;
  h = h * 1000003 + (uint64_t)count;
  h = h * 1000003 + (uint64_t)type;
  h = h * 1000003 + (uint64_t)(unsigned)op;
  h = h * 1000003 + (uint64_t)(unsigned)root;
  return h ? h : 1;
}

static ncclResult_t check_args(struct ncclComm *comm, ncclDataType_t type, int op, int root) {
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess) rc = sim_check_ready(comm);
  if (rc != ncclSuccess) return rc;
  if ((int)type < 0 || type >= ncclNumTypes)
    return sim_fail(ncclInvalidArgument, "invalid type %d", (int)type);
  if (root < 0 || root >= comm->nRanks)
    return sim_fail(ncclInvalidArgument, "invalid root %d (root should be in the 0..%d range)", root,
                    comm->nRanks);
  if (op < 0 || op >= ncclNumOps + (int)atomic_load(&comm->sim->redops))
    return sim_fail(ncclInvalidArgument, "invalid reduction operation %d", op);
  return ncclSuccess;
}

static ncclResult_t collective(int fn, const void *send, void *recv, size_t count,
                               ncclDataType_t type, int op, int root, struct ncclComm *comm,
                               cudaStream_t stream) {
  ncclResult_t rc = check_args(comm, type, op, root);
  if (rc != ncclSuccess) return sim_group_error(rc);
  if (count == 0 && SIM_VERSION_CODE >= 22005) return ncclSuccess;
  if (comm->nRanks == 1) sim_copy(stream, recv, send, count * sim_type_size(type));
  struct sim_call call = {.comm = comm, .stream = stream, .fn = fn};
  call.coll = (struct sim_coll){.fn = fn, .type = (int)type, .op = op, .root = root,
                                .count = count, .send = send, .recv = recv};
  call.coll.sig = signature(fn, count, type, op, root);
  return sim_submit(&call, 1);
}

static void *part(const void *base, int index, size_t bytes) {
  return base ? (char *)(uintptr_t)base + (size_t)index * bytes : NULL;
}

/* Pairs of a collective made of sends and receives: from and to are ranks or -1 for all.
 * Where the other side is all ranks, the buffer has a part for each of them. */
static ncclResult_t exchange(const void *send, void *recv, size_t count, ncclDataType_t type,
                             int from, int to, int root, struct ncclComm *comm,
                             cudaStream_t stream) {
  ncclResult_t rc = check_args(comm, type, 0, root);
  if (rc != ncclSuccess) return sim_group_error(rc);
  size_t bytes = count * sim_type_size(type);
  if (count && comm->nRanks == 1) sim_copy(stream, recv, send, bytes);
  if (count == 0 || comm->nRanks == 1) return ncclSuccess;
  struct sim_call *calls = calloc(2 * (size_t)comm->nRanks, sizeof *calls);
  bool small = bytes <= (size_t)sim_env("SIMNCCL_P2P_BUFFER", 65536);
  size_t n = 0;
  for (int r = 0; r < comm->nRanks; r++) {
    struct sim_call c = {.comm = comm, .stream = stream, .fn = -1};
    if ((from < 0 || from == comm->rank) && (to < 0 || to == r)) {
      c.p2p = (struct sim_p2p){.kind = P2P_SEND, .peer = r, .small = small, .bytes = bytes,
                               .buff = part(send, to < 0 ? r : 0, bytes)};
      calls[n++] = c;
    }
    if ((to < 0 || to == comm->rank) && (from < 0 || from == r)) {
      c.p2p = (struct sim_p2p){.kind = P2P_RECV, .peer = r, .bytes = bytes,
                               .buff = part(recv, from < 0 ? r : 0, bytes)};
      calls[n++] = c;
    }
  }
  rc = sim_submit(calls, n);
  free(calls);
  return rc;
}

#define COLLECTIVE(name, body) \
  SIM_API(ncclResult_t, nccl##name, SIM_ARGS_##name) { \
    body; \
  } \
  SIM_API(ncclResult_t, nccl##name##Config, SIM_ARGS_##name, const ncclCollConfig_t *config) { \
    (void)config; \
    body; \
  }

COLLECTIVE(AllReduce, return collective(FN_ALLREDUCE, sendbuff, recvbuff, count, datatype, (int)op, 0, comm, stream))
COLLECTIVE(Broadcast, return collective(FN_BROADCAST, sendbuff, recvbuff, count, datatype, 0, root, comm, stream))
COLLECTIVE(Reduce, return collective(FN_REDUCE, sendbuff, recvbuff, count, datatype, (int)op, root, comm, stream))
COLLECTIVE(AllGather, return collective(FN_ALLGATHER, sendbuff, recvbuff, sendcount, datatype, 0, 0, comm, stream))
COLLECTIVE(ReduceScatter,
           return collective(FN_REDUCESCATTER, sendbuff, recvbuff, recvcount, datatype, (int)op, 0, comm, stream))
COLLECTIVE(AlltoAll, return exchange(sendbuff, recvbuff, count, datatype, -1, -1, 0, comm, stream))
COLLECTIVE(Gather, return exchange(sendbuff, recvbuff, count, datatype, -1, root, root, comm, stream))
COLLECTIVE(Scatter, return exchange(sendbuff, recvbuff, count, datatype, root, -1, root, comm, stream))

/* Through the procedure linkage table, as in NCCL: a probe on both sees both. */
SIM_API(ncclResult_t, ncclBcast, void *buff, size_t count, ncclDataType_t datatype, int root,
        ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buff, buff, count, datatype, root, comm, stream);
}
