// What CUDA's compiler gives the text of mpizero/arrays/kernels.cu, for a C++ compiler: a grid is a loop over threads.
// The kernels share nothing between threads and wait for none, so any order of the threads will do.

#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dimensions { unsigned x = 1, y = 1, z = 1; };
static Dimensions gridDim, blockDim, blockIdx, threadIdx;

template <class Kernel> void launch(unsigned width, unsigned height, unsigned threads, Kernel kernel) {
    gridDim.x = width;
    gridDim.y = height;
    blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < height; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < width; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel();
}
