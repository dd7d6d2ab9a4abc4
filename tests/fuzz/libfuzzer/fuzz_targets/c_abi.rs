#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    vmm_pool_fuzz_targets::c_abi(bytes);
});
