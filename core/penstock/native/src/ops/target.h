// How a numeric kernel is compiled for more than one instruction set, and how it keeps the same bits on all of them.
//
// Every kernel file includes this header last, after the standard ones.  Invariant: products and sums are never
// contracted to fused multiply-adds, so that +, -, *, / and sqrt round in the same way in every clone of a function
// and on every machine.  Most kernels wait for memory, so this costs nothing that can be measured.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

// The loader picks the clone (an ifunc), which needs glibc; anywhere else there is one portable version.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define PENSTOCK_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef PENSTOCK_CLONES
#define PENSTOCK_CLONES
#endif

// The body of a cloned function: it must be inlined, else every clone would call the portable version.
#define PENSTOCK_BODY   \
  template <typename T> \
  static inline __attribute__((always_inline))

// The loop's iterations are independent, although pointers may be equal (never shifted against each other).
#if defined(__clang__)
#define PENSTOCK_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PENSTOCK_INDEPENDENT _Pragma("GCC ivdep")
#endif
