//! Many host threads on one pool; a test for each story.

macro_rules! tests {
    ($($room:ident { $($name:ident)* })*) => {
        $($(#[test]
        fn $name() {
            vmm_pool_tests::stories::tell(stringify!($name));
        })*)*
    };
}

vmm_pool_tests::thread_stories!(tests);
