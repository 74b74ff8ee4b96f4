// Local arithmetic of collectives on a GPU. The text compiles by NVRTC, by nvcc and, under a shim, by a C++ compiler.
//
// Macros say what `reduce` computes: ELEMENT (a name of mpizero.arrays.dtypes), OP (sum, prod, max, min, copy) and
// SOURCES (1 to 32; 1 for copy alone). Without them the text holds `move` alone.
//
// [Note: options] The bits of a result must not hang on compiler options that others choose: CuPy appends -ftz=true to
// those of its callers (https://github.com/cupy/cupy/issues/9576), and contraction into fused operations is on by
// default. So fp32 and fp64 arithmetic and fp32 comparisons are written as PTX with its rounding and without .ftz.
//
// [Note: memory] A target may be a source, element for element, so nothing is read through the read-only cache
// (ld.global.nc), and a thread reads all that it needs of a group of elements before it writes that group.

namespace mpizero {

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef signed char int8;
typedef short int16;
typedef int int32;
typedef long long int64;
typedef float float32;
typedef double float64;

struct bfloat16 { uint16 bits; };
struct float16 { uint16 bits; };
struct truth { uint8 byte; };
template <class Real> struct Complex { Real real, imag; };
typedef Complex<float> complex64;
typedef Complex<double> complex128;

enum class Op { sum, prod, max, min, copy };

struct Reduce {
    const void* sources[32];
    void* targets[32];
    uint64 count;         // elements of each source and target
    uint64 head;          // elements before the first at which every pointer is on 16 bytes; `count` if there is none
    uint32 divisor;       // of the result, in the accumulation type; 1 for none
    uint32 wide_sources;  // bit i: source i holds the accumulation type
    uint32 wide_targets;
    uint32 num_targets;
};

struct Move {
    const void* from[32];
    void* to[32];
    uint64 nbytes[32];    // run i is blockIdx.y == i
};

struct alignas(16) Line { uint32 words[4]; };

// The C++ type of an element, what it is accumulated in, and whether that is another type.
template <class T> struct Held { typedef T type; };
template <> struct Held<bool> { typedef truth type; };
template <class T> struct Wide { typedef T type; };
template <> struct Wide<bfloat16> { typedef float type; };
template <> struct Wide<float16> { typedef float type; };
template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
template <class T, Op WHICH> struct Accumulator { typedef typename Wide<T>::type type; };
template <class T> struct Accumulator<T, Op::max> { typedef T type; };
template <class T> struct Accumulator<T, Op::min> { typedef T type; };

template <class To, class From> __device__ __forceinline__ To as(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    union { From from; To to; } both;
    both.from = value;
    return both.to;
}

// Arithmetic of real numbers, one rounding each [Note: options].
#ifdef __CUDA_ARCH__
#define MPIZERO_ROUNDED(NAME, PTX, OPERATOR)                                                         \
    __device__ __forceinline__ float NAME(float a, float b) {                                        \
        float result;                                                                                \
        asm(PTX ".f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));                                 \
        return result;                                                                               \
    }                                                                                                \
    __device__ __forceinline__ double NAME(double a, double b) {                                     \
        double result;                                                                               \
        asm(PTX ".f64 %0, %1, %2;" : "=d"(result) : "d"(a), "d"(b));                                 \
        return result;                                                                               \
    }
#else
#define MPIZERO_ROUNDED(NAME, PTX, OPERATOR)                                                         \
    __device__ __forceinline__ float NAME(float a, float b) { return a OPERATOR b; }                 \
    __device__ __forceinline__ double NAME(double a, double b) { return a OPERATOR b; }
#endif
MPIZERO_ROUNDED(plus, "add.rn", +)
MPIZERO_ROUNDED(minus, "sub.rn", -)
MPIZERO_ROUNDED(times, "mul.rn", *)
MPIZERO_ROUNDED(over, "div.rn", /)
#undef MPIZERO_ROUNDED

__device__ __forceinline__ bool is_nan(float a) { return (as<uint32>(a) & 0x7fffffffu) > 0x7f800000u; }
__device__ __forceinline__ bool is_nan(double a) { return a != a; }

__device__ __forceinline__ bool at_least(float a, float b) {
#ifdef __CUDA_ARCH__
    uint32 result;
    asm("{\n\t.reg .pred p;\n\tsetp.ge.f32 p, %1, %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(result) : "f"(a), "f"(b));
    return result != 0;
#else
    return a >= b;
#endif
}
__device__ __forceinline__ bool at_least(double a, double b) { return a >= b; }

// 16-bit floats: to fp32 exactly, from fp32 to nearest, ties to even.
__device__ __forceinline__ float widen(bfloat16 a) { return as<float>((uint32)a.bits << 16); }

__device__ __forceinline__ void narrow(float a, bfloat16& to) {
    const uint32 bits = as<uint32>(a);
    to.bits = is_nan(a) ? 0x7fc0 : (uint16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float widen(float16 a) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(a.bits));
    return result;
}

__device__ __forceinline__ void narrow(float a, float16& to) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(a));
}
#else
__device__ __forceinline__ float widen(float16 a) {
    const uint32 sign = (uint32)(a.bits & 0x8000u) << 16, rest = a.bits & 0x7fffu;
    if (rest >= 0x7c00u) return as<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest >= 0x400u) return as<float>(sign | ((rest << 13) + (112u << 23)));
    return as<float>(sign | as<uint32>((float)rest * as<float>(103u << 23)));  // multiples of 2^-24
}

__device__ __forceinline__ void narrow(float a, float16& to) {
    const uint32 bits = as<uint32>(a), rest = bits & 0x7fffffffu;
    uint32 half;
    if (rest > 0x7f800000u) half = 0x7e00;
    else if (rest >= 0x47800000u) half = 0x7c00;  // 65536 and more
    else if (rest >= 0x38800000u) half = (rest + 0xfffu + ((rest >> 13) & 1u) - (112u << 23)) >> 13;
    else half = as<uint32>(as<float>(rest) + 0.5f) - 0x3f000000u;  // the sum is a multiple of 2^-24
    to.bits = (uint16)(half | (bits >> 16 & 0x8000u));
}
#endif

template <class T> __device__ __forceinline__ T widen(T a) { return a; }
template <class T> __device__ __forceinline__ void narrow(T a, T& to) { to = a; }

// The bits that a 16-bit float's NaN has after max and min.
template <class T> __device__ __forceinline__ T settled(T a) { return a; }
__device__ __forceinline__ bfloat16 settled(bfloat16 a) {
    a.bits = (a.bits & 0x7fffu) > 0x7f80u ? 0x7fc0 : a.bits;
    return a;
}

// `a op b`, a the operand of the lower source. Integers wrap, which only unsigned ones may in C++.
template <Op WHICH, class T> struct Apply {
    static_assert((T)0.5f == 0, "floats have their own");
    static __device__ __forceinline__ T to(T a, T b) {
        if constexpr (WHICH == Op::sum) return (T)((uint64)a + (uint64)b);
        else if constexpr (WHICH == Op::prod) return (T)((uint64)a * (uint64)b);
        else if constexpr (WHICH == Op::max) return a >= b ? a : b;
        else return a <= b ? a : b;
    }
};

template <Op WHICH> struct Apply<WHICH, truth> {
    static __device__ __forceinline__ truth to(truth a, truth b) {
        const bool one = WHICH == Op::sum || WHICH == Op::max;
        return truth{(uint8)(one ? a.byte || b.byte : a.byte && b.byte)};
    }
};

template <Op WHICH, class T> struct ApplyFloat {
    static __device__ __forceinline__ T to(T a, T b) {
        if constexpr (WHICH == Op::sum) return plus(a, b);
        else if constexpr (WHICH == Op::prod) return times(a, b);
        else {
            const auto left = widen(a), right = widen(b);
            const bool first = WHICH == Op::max ? at_least(left, right) : at_least(right, left);
            return first || is_nan(left) ? a : b;
        }
    }
};
template <Op WHICH> struct Apply<WHICH, float> : ApplyFloat<WHICH, float> {};
template <Op WHICH> struct Apply<WHICH, double> : ApplyFloat<WHICH, double> {};
template <Op WHICH> struct Apply<WHICH, bfloat16> : ApplyFloat<WHICH, bfloat16> {};
template <Op WHICH> struct Apply<WHICH, float16> : ApplyFloat<WHICH, float16> {};

template <Op WHICH, class Real> struct Apply<WHICH, Complex<Real>> {
    static_assert(WHICH == Op::sum || WHICH == Op::prod, "complex numbers have no order");
    static __device__ __forceinline__ Complex<Real> to(Complex<Real> a, Complex<Real> b) {
        if constexpr (WHICH == Op::sum) return {plus(a.real, b.real), plus(a.imag, b.imag)};
        else return {minus(times(a.real, b.real), times(a.imag, b.imag)),
                     plus(times(a.real, b.imag), times(a.imag, b.real))};
    }
};

// Division of the result. By a power of two it is a product, which has the same bits and takes a tenth of the steps.
struct Divisor {
    uint32 value;
    bool power;
    __device__ __forceinline__ explicit Divisor(uint32 by) : value(by), power((by & (by - 1)) == 0) {}
    template <class Real> __device__ __forceinline__ Real real(Real a) const {
        return power ? times(a, over((Real)1, (Real)value)) : over(a, (Real)value);
    }
    __device__ __forceinline__ float operator()(float a) const { return real(a); }
    __device__ __forceinline__ double operator()(double a) const { return real(a); }
    template <class Real> __device__ __forceinline__ Complex<Real> operator()(Complex<Real> a) const {
        return {real(a.real), real(a.imag)};
    }
    template <class T> __device__ __forceinline__ T operator()(T a) const { return a; }
};

// 16 bytes of global memory. Volatile, so that the compiler keeps their order [Note: memory].
__device__ __forceinline__ Line load_line(const void* from) {
#ifdef __CUDA_ARCH__
    Line line;
    asm volatile("{\n\t.reg .u64 at;\n\tcvta.to.global.u64 at, %4;\n\tld.global.v4.u32 {%0, %1, %2, %3}, [at];\n\t}"
                 : "=r"(line.words[0]), "=r"(line.words[1]), "=r"(line.words[2]), "=r"(line.words[3]) : "l"(from));
    return line;
#else
    return *(const Line*)from;
#endif
}

// The same where `wanted`, without a branch that would keep later loads from being on their way.
__device__ __forceinline__ Line load_line_if(bool wanted, const void* from) {
#ifdef __CUDA_ARCH__
    Line line = {{0, 0, 0, 0}};
    asm volatile("{\n\t.reg .u64 at;\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\tcvta.to.global.u64 at, %4;\n\t"
                 "@p ld.global.v4.u32 {%0, %1, %2, %3}, [at];\n\t}"
                 : "+r"(line.words[0]), "+r"(line.words[1]), "+r"(line.words[2]), "+r"(line.words[3])
                 : "l"(from), "r"((uint32)wanted));
    return line;
#else
    return wanted ? *(const Line*)from : Line{{0, 0, 0, 0}};
#endif
}

__device__ __forceinline__ void store_line(void* to, Line line) {
#ifdef __CUDA_ARCH__
    asm volatile("{\n\t.reg .u64 at;\n\tcvta.to.global.u64 at, %0;\n\tst.global.v4.u32 [at], {%1, %2, %3, %4};\n\t}"
                 :: "l"(to), "r"(line.words[0]), "r"(line.words[1]), "r"(line.words[2]), "r"(line.words[3]) : "memory");
#else
    *(Line*)to = line;
#endif
}

template <class T, int N> struct Group { T items[N]; };

// What one source holds of a group of elements: as lines, or as one element that need not be on 16 bytes.
template <class T, class A, int N, bool LINES> struct Piece {
    static constexpr bool MIXED = !Same<T, A>::value;
    union Raw {
        Line lines[MIXED ? 2 : 1];
        Group<T, N> narrow;
        Group<A, N> wide;
    } raw;
    bool is_wide;

    __device__ __forceinline__ void load(const void* base, uint64 at, bool holds_wide) {
        is_wide = MIXED && holds_wide;
        if constexpr (LINES) {
            const char* from = (const char*)base + at * (is_wide ? sizeof(A) : sizeof(T));
            raw.lines[0] = load_line(from);
            if constexpr (MIXED) raw.lines[1] = load_line_if(is_wide, from + 16);
        } else if (is_wide) {
            raw.wide.items[0] = ((const A*)base)[at];
        } else {
            raw.narrow.items[0] = ((const T*)base)[at];
        }
    }

    __device__ __forceinline__ Group<A, N> value() const {
        Group<A, N> group;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (MIXED) group.items[i] = is_wide ? raw.wide.items[i] : widen(raw.narrow.items[i]);
            else group.items[i] = raw.narrow.items[i];
        }
        return group;
    }
};

template <int COUNT> struct Split {  // the largest power of two below COUNT
    static constexpr int value = 2 * Split<(COUNT + 1) / 2>::value;
};
template <> struct Split<2> { static constexpr int value = 1; };

template <class T, Op WHICH, int NUM> struct Reduction {
    typedef typename Accumulator<T, WHICH>::type A;
    static_assert((NUM == 1) == (WHICH == Op::copy) && NUM <= 32, "one source is a copy");
    static constexpr int N = 16 / sizeof(T);  // elements of a line
    static constexpr int AT_ONCE = 8;  // sources whose loads are on their way together; a power of two, so a subtree
    static constexpr bool MIXED = !Same<T, A>::value;
    // Groups of a thread's turn: at least four lines are on their way, without more registers than a block can have.
    static constexpr int STEPS = NUM == 1 ? 4 : NUM <= (MIXED ? 2 : 3) ? 2 : 1;

    const Reduce& params;
    const Divisor divide;
    __device__ __forceinline__ explicit Reduction(const Reduce& p) : params(p), divide(p.divisor) {}

    // The canonical tree over sources [FIRST, FIRST + COUNT).
    template <int FIRST, int COUNT, class P, int M>
    static __device__ __forceinline__ Group<A, M> fold(const P* pieces) {
        if constexpr (COUNT == 1) {
            return pieces[FIRST].value();
        } else {
            constexpr int HALF = Split<COUNT>::value;
            return both(fold<FIRST, HALF, P, M>(pieces), fold<FIRST + HALF, COUNT - HALF, P, M>(pieces));
        }
    }

    template <int M> static __device__ __forceinline__ Group<A, M> both(Group<A, M> left, const Group<A, M>& right) {
        if constexpr (WHICH != Op::copy) {
#pragma unroll
            for (int i = 0; i < M; ++i) left.items[i] = Apply<WHICH, A>::to(left.items[i], right.items[i]);
        }
        return left;
    }

    template <int COUNT, class P> __device__ __forceinline__ void load(P* pieces, int first, uint64 at) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            pieces[i].load(params.sources[first + i], at, params.wide_sources >> (first + i) & 1);
        }
    }

    template <int FIRST, int COUNT, class P, int M> __device__ __forceinline__ Group<A, M> total(uint64 at) const {
        if constexpr (COUNT <= AT_ONCE) {
            P pieces[COUNT];
            load<COUNT>(pieces, FIRST, at);
            return fold<0, COUNT, P, M>(pieces);
        } else {
            constexpr int HALF = Split<COUNT>::value;
            const Group<A, M> left = total<FIRST, HALF, P, M>(at);
            return both(left, total<FIRST + HALF, COUNT - HALF, P, M>(at));
        }
    }

    // Divide, round once, and store a group in every target.
    template <class P, int M, bool LINES>
    __device__ __forceinline__ void finish(uint64 at, Group<A, M> group, const P& first) const {
        P out;
        const bool divided = params.divisor != 1;
#pragma unroll
        for (int i = 0; i < M; ++i) {
            if (divided) group.items[i] = divide(group.items[i]);
            if constexpr (WHICH == Op::max || WHICH == Op::min) group.items[i] = settled(group.items[i]);
            narrow(group.items[i], out.raw.narrow.items[i]);
        }
        if constexpr (WHICH == Op::copy && P::MIXED) {
            if (!divided && !first.is_wide) out.raw.narrow = first.raw.narrow;  // a NaN keeps its bits
        }
#pragma unroll 1
        for (uint32 target = 0; target < params.num_targets; ++target) {
            const bool is_wide = P::MIXED && (params.wide_targets >> target & 1);
            put<P, M, LINES>(params.targets[target], at, is_wide, out, group);
        }
    }

    template <class P, int M, bool LINES>
    static __device__ __forceinline__ void put(
        void* base, uint64 at, bool is_wide, const P& out, const Group<A, M>& group) {
        if constexpr (!LINES) {
            if (is_wide) ((A*)base)[at] = group.items[0];
            else ((T*)base)[at] = out.raw.narrow.items[0];
        } else if (is_wide) {
            P wide;
            wide.raw.wide = group;
            char* const to = (char*)base + at * sizeof(A);
            store_line(to, wide.raw.lines[0]);
            if constexpr (P::MIXED) store_line(to + 16, wide.raw.lines[1]);
        } else {
            store_line((char*)base + at * sizeof(T), out.raw.lines[0]);
        }
    }

    // Groups of M elements at `at`, `at + stride`, ...
    template <int COUNT, int M, bool LINES> __device__ __forceinline__ void turn(uint64 at, uint64 stride) const {
        typedef Piece<T, A, M, LINES> P;
        if constexpr (NUM <= AT_ONCE) {
            P pieces[COUNT][NUM];
#pragma unroll
            for (int step = 0; step < COUNT; ++step) load<NUM>(pieces[step], 0, at + step * stride);
#pragma unroll
            for (int step = 0; step < COUNT; ++step) {
                finish<P, M, LINES>(at + step * stride, fold<0, NUM, P, M>(pieces[step]), pieces[step][0]);
            }
        } else {
#pragma unroll
            for (int step = 0; step < COUNT; ++step) {
                finish<P, M, LINES>(at + step * stride, total<0, NUM, P, M>(at + step * stride), P());
            }
        }
    }

    // Elements [first, last) in groups of M; the block's turns are STEPS rows of one group per thread.
    template <int M, bool LINES> __device__ __forceinline__ void range(uint64 first, uint64 last) const {
        const uint64 row = (uint64)blockDim.x * M, tile = row * STEPS, mine = (uint64)threadIdx.x * M;
        uint64 at = first + blockIdx.x * tile;
        for (; at + tile <= last; at += gridDim.x * tile) turn<STEPS, M, LINES>(at + mine, row);
        for (uint64 left = at + mine; left < last && left < at + tile; left += row) turn<1, M, LINES>(left, row);
    }

    __device__ __forceinline__ void run() const {
        const uint64 lines = params.head + (params.count - params.head) / N * N;
        range<N, true>(params.head, lines);
        range<1, false>(0, params.head);
        range<1, false>(lines, params.count);
    }
};

// Copy a run in words of type Word, on which both ends are equally far from alignment; single bytes before and after.
template <class Word> __device__ __forceinline__ Word load_word(const Word* from) { return *from; }
template <> __device__ __forceinline__ Line load_word(const Line* from) { return load_line(from); }
template <class Word> __device__ __forceinline__ void store_word(Word* to, Word word) { *to = word; }
template <> __device__ __forceinline__ void store_word(Line* to, Line word) { store_line(to, word); }

template <class Word> __device__ __forceinline__ void move_words(const char* from, char* to, uint64 nbytes) {
    constexpr int STEPS = 4;
    uint64 head = -(uint64)from & (sizeof(Word) - 1);
    head = head < nbytes ? head : nbytes;
    const uint64 words = (nbytes - head) / sizeof(Word), tail = head + words * sizeof(Word);
    const uint64 row = blockDim.x, tile = row * STEPS, mine = threadIdx.x;
    const Word* const source = (const Word*)(from + head);
    Word* const target = (Word*)(to + head);
    uint64 at = blockIdx.x * tile;
    for (; at + tile <= words; at += gridDim.x * tile) {
        Word held[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) held[step] = load_word(source + at + step * row + mine);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) store_word(target + at + step * row + mine, held[step]);
    }
    for (uint64 left = at + mine; left < words && left < at + tile; left += row) {
        store_word(target + left, load_word(source + left));
    }
    if (blockIdx.x == 0) {
        for (uint64 byte = mine; byte < head; byte += row) to[byte] = from[byte];
        for (uint64 byte = tail + mine; byte < nbytes; byte += row) to[byte] = from[byte];
    }
}

#ifdef ELEMENT
extern "C" __global__ void __launch_bounds__(256) reduce(const __grid_constant__ Reduce params) {
    Reduction<Held<ELEMENT>::type, Op::OP, SOURCES>(params).run();
}
#else
extern "C" __global__ void __launch_bounds__(256) move(const __grid_constant__ Move params) {
    const char* const from = (const char*)params.from[blockIdx.y];
    char* const to = (char*)params.to[blockIdx.y];
    const uint64 nbytes = params.nbytes[blockIdx.y], apart = (uint64)from ^ (uint64)to;
    if (apart % 16 == 0) move_words<Line>(from, to, nbytes);
    else if (apart % 8 == 0) move_words<uint64>(from, to, nbytes);
    else if (apart % 4 == 0) move_words<uint32>(from, to, nbytes);
    else if (apart % 2 == 0) move_words<uint16>(from, to, nbytes);
    else move_words<uint8>(from, to, nbytes);
}
#endif

}  // namespace mpizero
