/* Point-to-point and one-sided calls. */
#include "sim.h"

static ncclResult_t check_peer(struct ncclComm *comm, int peer) {
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess) rc = sim_check_ready(comm);
  if (rc != ncclSuccess) return rc;
  if (peer < 0 || peer >= comm->nRanks)
    return sim_fail(ncclInvalidArgument, "invalid peer %d (should be in the 0..%d range)", peer,
                    comm->nRanks);
  return ncclSuccess;
}

static ncclResult_t point(enum sim_p2p_kind kind, const void *buff, size_t count, ncclDataType_t type, int peer,
                          struct ncclComm *comm, cudaStream_t stream) {
  static _Atomic long buffer = -1;
  ncclResult_t rc = check_peer(comm, peer);
  if (rc == ncclSuccess && ((int)type < 0 || type >= ncclNumTypes))
    rc = sim_fail(ncclInvalidArgument, "invalid type %d", (int)type);
  if (rc != ncclSuccess) return sim_group_error(rc);
  if (atomic_load(&buffer) < 0) atomic_store(&buffer, sim_env("SIMNCCL_P2P_BUFFER", 65536));
  size_t bytes = count * sim_type_size(type);
  bool small = bytes <= (size_t)atomic_load(&buffer);
  struct sim_call call = {.comm = comm, .stream = stream, .fn = -1};
  call.p2p = (struct sim_p2p){.kind = kind, .peer = peer, .small = small, .bytes = bytes,
                              .buff = (void *)(uintptr_t)buff};
  return sim_submit(&call, 1);
}

SIM_API(ncclResult_t, ncclSend, const void *sendbuff, size_t count, ncclDataType_t datatype,
        int peer, ncclComm_t comm, cudaStream_t stream) {
  return point(P2P_SEND, sendbuff, count, datatype, peer, comm, stream);
}

SIM_API(ncclResult_t, ncclRecv, void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
        ncclComm_t comm, cudaStream_t stream) {
  return point(P2P_RECV, recvbuff, count, datatype, peer, comm, stream);
}

SIM_API(ncclResult_t, ncclPutSignal, const void *localbuff, size_t count, ncclDataType_t datatype,
        int peer, ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx,
        unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  (void)localbuff, (void)peerWin, (void)peerWinOffset, (void)sigIdx, (void)ctx, (void)flags;
  return point(P2P_SIGNAL, NULL, count, datatype, peer, comm, stream);
}

SIM_API(ncclResult_t, ncclSignal, int peer, int sigIdx, int ctx, unsigned int flags,
        ncclComm_t comm, cudaStream_t stream) {
  (void)sigIdx, (void)ctx, (void)flags;
  return point(P2P_SIGNAL, NULL, 0, ncclInt8, peer, comm, stream);
}

SIM_API(ncclResult_t, ncclWaitSignal, int nDesc, ncclWaitSignalDesc_t *signalDescs,
        ncclComm_t comm, cudaStream_t stream) {
  ncclResult_t rc = sim_check(comm);
  if (rc == ncclSuccess && (nDesc < 1 || !signalDescs))
    rc = sim_fail(ncclInvalidArgument, "WaitSignal: %d descriptors", nDesc);
  for (int i = 0; i < nDesc && rc == ncclSuccess; i++) rc = check_peer(comm, signalDescs[i].peer);
  for (int i = 0; i < nDesc && rc == ncclSuccess; i++) {
    struct sim_call call = {.comm = comm, .stream = stream, .fn = -1};
    call.p2p = (struct sim_p2p){.kind = P2P_WAIT, .peer = signalDescs[i].peer};
    call.p2p.idx = (uint64_t)signalDescs[i].opCnt;
    rc = sim_submit(&call, 1);
  }
  return sim_group_error(rc);
}
