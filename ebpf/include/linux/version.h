/* A version new enough for every helper that BCC would else leave out; the
 * kernel does not compare it for the kinds of programs used here. */
#ifndef NCP_STUB_VERSION_H
#define NCP_STUB_VERSION_H
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + ((c) > 255 ? 255 : (c)))
#ifdef LINUX_VERSION_CODE_OVERRIDE
#define LINUX_VERSION_CODE LINUX_VERSION_CODE_OVERRIDE
#else
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 15, 0)
#endif
#endif
