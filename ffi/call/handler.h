// What a handler is made of. A file *.cc of this folder has the checks and the handlers of one operation; it is compiled into the
// module of the CPU and, with S24_CUDA_MODULE, into that of CUDA. A device gives `Device`, `compute` and `clear`.
#pragma once
#if defined(S24_CUDA_MODULE)
#include "../cuda/device.h"
#else
#include "../cpu/device.h"
#endif
#include "target.h"
