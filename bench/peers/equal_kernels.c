/* Preloaded for a column: MKL asks these two whether the processor is its own vendor's, and takes slow kernels on any
 * other. ANSWER 1 (column "equal"): every contender gets the same fast kernels; on an Intel processor nothing changes.
 * ANSWER 0 (column "foreign"): every contender gets what another vendor's processor gets.
 * Source: the exported names of MKL's dispatcher. */

int mkl_serv_intel_cpu_true(void) { return ANSWER; }

int mkl_serv_intel_cpu(void) { return ANSWER; }
