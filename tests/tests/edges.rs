//! Edges: sizes, limits, gates, plateaus, accounts, drops; a test for each story.

macro_rules! tests {
    ($($room:ident { $($name:ident)* })*) => {
        $(mod $room {
            $(#[test]
            fn $name() {
                vmm_pool_tests::stories::tell(stringify!($name));
            })*
        })*
    };
}

vmm_pool_tests::edge_stories!(tests);
