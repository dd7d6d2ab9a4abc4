#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    vmm_pool_fuzz_targets::environment(bytes);
});
