/* Wanted by BCC's headers; nothing of it is used. */
#include <linux/types.h>
