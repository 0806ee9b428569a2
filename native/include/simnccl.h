/* The NCCL API as simnccl offers it: prototypes of the traced functions, with
 * NCCL's argument order, types and values, written from its documentation.
 * simnccl is a CPU-only stand-in for tests. It is not NCCL, and moves data
 * only where a driver stand-in (simcuda) has said which memory is the device's. */
#ifndef SIMNCCL_H
#define SIMNCCL_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
} ncclResult_t;

typedef enum {
  ncclInt8 = 0, ncclUint8 = 1, ncclInt32 = 2, ncclUint32 = 3, ncclInt64 = 4, ncclUint64 = 5,
  ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9, ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11, ncclNumTypes = 12,
} ncclDataType_t;

typedef enum {
  ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff,
} ncclRedOp_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

typedef struct ncclComm *ncclComm_t;
typedef struct sim_window *ncclWindow_t;
typedef struct sim_stream_handle *cudaStream_t;
typedef struct ncclCollConfig ncclCollConfig_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_MAGIC 0xcafebeefU
#define NCCL_SPLIT_NOCOLOR (-1)
typedef struct {
  size_t size;      /* 0 */
  unsigned magic;   /* 8 */
  unsigned version; /* 12 */
  int blocking;     /* 16 */
  int cgaClusterSize, minCTAs, maxCTAs;
  const char *netName; /* 32 */
  int splitShare, trafficClass;
  const char *commName; /* 48, from 2.27 */
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
} ncclConfig_t;

typedef struct {
  size_t size;
  unsigned magic, version;
  float estimatedTime;
} ncclSimInfo_t;

typedef struct {
  int opCnt, peer, sigIdx, ctx;
} ncclWaitSignalDesc_t;

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId *commIds, ncclConfig_t *config);
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config);
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                            ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags);
ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank,
                          ncclComm_t *newcomm, ncclConfig_t *config);
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
ncclResult_t ncclCommResume(ncclComm_t comm);
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);

/* Argument lists shared by each collective and its *Config variant. */
#define SIM_ARGS_AllReduce \
  const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, \
      ncclComm_t comm, cudaStream_t stream
#define SIM_ARGS_Broadcast \
  const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, \
      ncclComm_t comm, cudaStream_t stream
#define SIM_ARGS_Reduce \
  const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, \
      int root, ncclComm_t comm, cudaStream_t stream
#define SIM_ARGS_AllGather \
  const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, \
      ncclComm_t comm, cudaStream_t stream
#define SIM_ARGS_ReduceScatter \
  const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, \
      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream
#define SIM_ARGS_AlltoAll \
  const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, \
      cudaStream_t stream
#define SIM_ARGS_Gather \
  const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, \
      ncclComm_t comm, cudaStream_t stream
#define SIM_ARGS_Scatter SIM_ARGS_Gather

#define SIM_DECLARE(name) \
  ncclResult_t nccl##name(SIM_ARGS_##name); \
  ncclResult_t nccl##name##Config(SIM_ARGS_##name, const ncclCollConfig_t *config);
SIM_DECLARE(AllReduce)
SIM_DECLARE(Broadcast)
SIM_DECLARE(Reduce)
SIM_DECLARE(AllGather)
SIM_DECLARE(ReduceScatter)
SIM_DECLARE(AlltoAll)
SIM_DECLARE(Gather)
SIM_DECLARE(Scatter)
#undef SIM_DECLARE
ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root,
                       ncclComm_t comm, cudaStream_t stream);

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
                           ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx,
                           unsigned int flags, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                        cudaStream_t stream);
ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm,
                            cudaStream_t stream);

ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo);

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle);
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                    int winFlags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
ncclResult_t ncclMemAlloc(void **ptr, size_t size);
ncclResult_t ncclMemFree(void *ptr);
ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void *requirements, void *outDevComm);
ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const void *devComm);
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm);
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

/* simnccl's own: what the CUDA runtime offers to a program that uses NCCL. */
void simSetDevice(int dev); /* device of this thread; default LOCAL_RANK or 0 */
cudaStream_t simStreamCreate(void);
int simStreamDestroy(cudaStream_t stream);     /* waits; 0 */
int simStreamSynchronize(cudaStream_t stream); /* 0 when all queued work is done */
int simStreamQuery(cudaStream_t stream);       /* 0 done, 600 not ready (as cudaErrorNotReady) */
/* For a driver stand-in. A step is called in the stream's order, maybe several times and by
 * any thread, until it returns other than 0; it must not wait, nor call simnccl. */
void simStreamEnqueue(cudaStream_t stream, int (*step)(void *arg), void *arg);
/* `holds` tells device memory from other pointers; from now on such buffers get their data. */
void simSetMemory(int (*holds)(const void *pointer, size_t size));
int simCleanup(void); /* removes segments that no living process holds; returns their number */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
