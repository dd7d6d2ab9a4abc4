//! What the examples share.

use cudarc::cublas::GemmConfig;
use cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_N;

/// The product of two square matrices.
pub(crate) fn square_of(side: i32) -> GemmConfig<f32> {
    GemmConfig {
        transa: CUBLAS_OP_N,
        transb: CUBLAS_OP_N,
        m: side,
        n: side,
        k: side,
        alpha: 1.0,
        lda: side,
        ldb: side,
        beta: 0.0,
        ldc: side,
    }
}
