/* The wrappers: the names that this library exports, and a set for each copy of
 * NCCL that a program may look up by hand. */
#include "call.h"
#include "ncp_wrappers.h"
