//! What each operation of the pool costs in driver calls, in each state, as a table in a file.
//!
//! The table is made again on the simulated device and compared. A change of it is a change of what
//! users pay: `VMM_UPDATE_GOLDEN=1 cargo test -p vmm-pool-tests --test driver_calls` writes it anew,
//! and the difference is reviewed.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::fmt::Write as _;
use std::path::Path;

use vmm_pool::{Buffer, ChunkSize, DebugMode, Lane, Placement, Pool, PoolBuilder, Request};
use vmm_pool_tests::{DriverChoice, Machine, MachineSpec, any_driver};
use vmm_sys::Access::ReadWrite;
use vmm_sys::DeviceId;
use vmm_sys::object::Stream;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Writes one line an operation.
struct Table {
    text: String,
    machine: Machine,
}

impl Table {
    fn chapter(&mut self, title: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        let _ = writeln!(self.text, "{title}");
        // What one state leaves must not be found by the next.
        self.machine = Machine::simulated(MachineSpec { devices: 2, ..MachineSpec::default() });
    }

    fn line<T>(&mut self, operation: &str, work: impl FnOnce(&Machine) -> T) -> T {
        let before = self.machine.driver().ledger().snapshot();
        let result = work(&self.machine);
        let calls = self.machine.driver().ledger().snapshot().since(&before);
        let _ = writeln!(self.text, "  {operation}: {calls}");
        result
    }

    fn stream(&self) -> Stream {
        self.machine.stream(0)
    }

    /// A pool and a lane, not counted.
    fn lane(&self, settings: impl FnOnce(PoolBuilder) -> PoolBuilder) -> (Pool, Lane) {
        let builder = Pool::builder(self.machine.driver().clone()).background(false);
        let pool = settings(builder).build().unwrap();
        let lane = pool.lane(&self.stream()).unwrap();
        (pool, lane)
    }
}

fn alloc(lane: &Lane, bytes: u64) -> Buffer {
    lane.alloc(bytes).unwrap()
}

fn plain(builder: PoolBuilder) -> PoolBuilder {
    builder
}

fn open_and_end(table: &mut Table) {
    table.chapter("A pool begins and ends");
    let builder = Pool::builder(table.machine.driver().clone()).background(false);
    let pool = table.line("build", |_| builder.clone().build().unwrap());
    let stream = table.stream();
    let lane = table.line("open a lane", |_| pool.lane(&stream).unwrap());
    drop(table.line("find it again", |_| pool.lane(&stream).unwrap()));
    table.line("close a lane that was never used", |_| pool.close_lane(&stream));
    drop(lane);
    table.line("drop a pool that was never used", |_| drop(pool));

    let both = builder.clone().device(DeviceId(0)).device(DeviceId(1));
    let pool = table.line("build for two devices", |_| both.build().unwrap());
    drop(pool);
    let stocked = builder.stock_marks(64 * MIB, u64::MAX);
    let pool = table.line("build with 64 MiB of stock", |_| stocked.build().unwrap());
    table.line("drop it", |_| drop(pool));

    let (pool, lane) = table.lane(plain);
    let buffer = alloc(&lane, MIB);
    let stream = lane.stream().clone();
    drop(buffer);
    table.line("close a lane of one chunk", |_| pool.close_lane(&stream));
    drop(lane);
    table.line("drop a pool with one chunk in stock", |_| drop(pool));
    let (pool, lane) = table.lane(plain);
    let buffer = alloc(&lane, MIB);
    table.line("drop a pool while a buffer lives", |_| drop((lane, pool)));
    table.line("drop the buffer after it", |_| drop(buffer));
}

fn cold_and_warm(table: &mut Table) {
    table.chapter("Requests, cold and warm, chunks of 2 MiB");
    let (pool, lane) = table.lane(|builder| builder.chunk(ChunkSize::Fixed(2 * MIB)));
    table.line("zero bytes", |_| drop(alloc(&lane, 0)));
    table.line("too large", |_| drop(lane.alloc(u64::MAX)));
    table.line("bad alignment", |_| drop(lane.alloc_with(&Request::new(1).align(3))));
    let first = table.line("first 2 MiB", |_| alloc(&lane, 2 * MIB));
    let second = table.line("second 2 MiB", |_| alloc(&lane, 2 * MIB));
    table.line("warm free", |_| drop(first));
    let first = table.line("warm 2 MiB", |_| alloc(&lane, 2 * MIB));
    let small = table.line("first small request", |_| alloc(&lane, 1000));
    table.line("second small request", |_| drop(alloc(&lane, 1000)));
    table.line("warm small request, after another size", |_| drop(alloc(&lane, 5000)));
    let aligned = Request::new(100).align(4096);
    let aligned = table.line("an alignment of 4 KiB", |_| lane.alloc_with(&aligned).unwrap());
    table.line("write 1 KiB", |_| small.write(0, &[1; 1000]).unwrap());
    table.line("read 1 KiB", |_| small.read(0, &mut [0; 1000]).unwrap());
    table.line("figures, walker", |_| (pool.stats(), pool.verify().unwrap()));
    drop((first, second, small, aligned));
}

fn growth(table: &mut Table) {
    for (name, chunk_bytes) in [("32 MiB", 32 * MIB), ("2 MiB", 2 * MIB)] {
        table.chapter(&format!("Growth of 1 GiB by chunks of {name}"));
        let (pool, lane) = table.lane(|builder| builder.chunk(ChunkSize::Fixed(chunk_bytes)));
        let buffer = table.line("new", |_| alloc(&lane, GIB));
        drop(buffer);
        table.line("trim", |_| pool.trim(DeviceId(0)).unwrap());
        table.line("prefill", |_| pool.prefill(DeviceId(0), GIB).unwrap());
        let buffer = table.line("from stock", |_| alloc(&lane, GIB));
        table.line("free", |_| drop(buffer));
        table.line("warm", |_| drop(alloc(&lane, GIB)));
    }
    table.chapter("Growth in small steps, chunks chosen automatically");
    let (_pool, lane) = table.lane(plain);
    let buffers =
        table.line("100 x 1 MiB", |_| (0..100).map(|_| alloc(&lane, MIB)).collect::<Vec<_>>());
    table.line("free them", |_| drop(buffers));
    table.line("100 x 1 MiB again", |_| {
        drop((0..100).map(|_| alloc(&lane, MIB)).collect::<Vec<_>>());
    });
}

fn limbo(table: &mut Table) {
    table.chapter("Memory that other streams use");
    let (pool, lane) = table.lane(|builder| builder.chunk(ChunkSize::Fixed(2 * MIB)));
    let (other, third) = (table.stream(), table.stream());
    let mut buffer = alloc(&lane, 2 * MIB);
    let own = lane.stream().clone();
    table.line("record the lane's own stream", |_| buffer.record_stream(&own).unwrap());
    table.line("record another", |_| buffer.record_stream(&other).unwrap());
    table.line("record it again", |_| buffer.record_stream(&other).unwrap());
    table.line("free with one recorded stream", |_| drop(buffer));
    let keep = table.line("next request, the stream is done", |_| alloc(&lane, 2 * MIB));
    let mut buffer = alloc(&lane, 2 * MIB);
    buffer.record_stream(&other).unwrap();
    buffer.record_stream(&third).unwrap();
    let hold = table.machine.hold(&other).unwrap();
    table.line("free with two recorded streams", |_| drop(buffer));
    let more = table.line("next request, one of them is held", |_| alloc(&lane, 2 * MIB));
    drop(hold);
    table.line("trim, both are done", |_| pool.trim(DeviceId(0)).unwrap());
    drop((keep, more));
}

fn moves(table: &mut Table) {
    table.chapter("Beyond the soft limit a free chunk moves");
    let tight =
        |builder: PoolBuilder| builder.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0));
    let (_pool, lane) = table.lane(tight);
    let hole = alloc(&lane, 2 * MIB);
    let keep = alloc(&lane, 2 * MIB);
    drop(hole);
    let larger = table.line("4 MiB from a free chunk and a new one", |_| alloc(&lane, 4 * MIB));
    let next = table.line("a request after it", |_| alloc(&lane, 2 * MIB));
    drop((keep, larger, next));
}

fn shortage(table: &mut Table) {
    table.chapter("At the limit of 8 MiB, chunks of 2 MiB");
    let (pool, one) =
        table.lane(|builder| builder.chunk(ChunkSize::Fixed(2 * MIB)).limit_bytes(8 * MIB));
    let two = pool.lane(&table.stream()).unwrap();
    let all = alloc(&one, 8 * MIB);
    table.line("a hopeless request", |_| drop(one.alloc(2 * MIB)));
    table.line("the same of another lane", |_| drop(two.alloc(2 * MIB)));
    drop(all);
    let all = table.line("all of it, idle in another lane", |_| alloc(&two, 8 * MIB));
    drop(all);
    table.line("trim", |_| pool.trim(DeviceId(0)).unwrap());
    table.line("trim again", |_| pool.trim(DeviceId(0)).unwrap());
}

fn placements(table: &mut Table) {
    for (name, placement) in [("first fit", Placement::FirstFit), ("buddy", Placement::Buddy)] {
        table.chapter(&format!("The same odd sizes, placed by {name}"));
        let (_pool, lane) = table.lane(|builder| builder.placement(placement));
        let sizes = [3, 5, 9, 17, 33, 7].map(|mib| mib * MIB + 1000);
        let buffers = table.line("new", |_| sizes.map(|bytes| alloc(&lane, bytes)));
        table.line("free", |_| drop(buffers));
        table.line("in the other order", |_| {
            let mut sizes = sizes;
            sizes.reverse();
            drop(sizes.map(|bytes| alloc(&lane, bytes)));
        });
    }
}

fn elastic(table: &mut Table) {
    table.chapter("Elastic buffers, chunks of 2 MiB, two devices");
    let builder = Pool::builder(table.machine.driver().clone()).background(false);
    let builder = builder.chunk(ChunkSize::Fixed(2 * MIB));
    let pool = builder.device(DeviceId(0)).device(DeviceId(1)).build().unwrap();
    let (stream, far) = (table.stream(), table.machine.stream(1));
    let settings = pool.elastic(DeviceId(0)).capacity_bytes(1 << 40);
    let buffer = table.line("build, 1 TiB of capacity", |_| settings.build().unwrap());
    table.line("grow by 4 chunks, new", |_| buffer.grow_to(8 * MIB).unwrap());
    table.line("grow to what is there", |_| buffer.grow_to(8 * MIB).unwrap());
    table.line("shrink, never used", |_| buffer.shrink_to(0).unwrap());
    table.line("grow by 4 chunks, from stock", |_| buffer.grow_to(8 * MIB).unwrap());
    table.line("first use on a stream", |_| drop(buffer.use_on(&stream).unwrap()));
    table.line("second use", |_| drop(buffer.use_on(&stream).unwrap()));
    let first =
        table.line("grant to a peer, the first time", |_| buffer.grant(DeviceId(1), ReadWrite));
    first.unwrap();
    table.line("revoke", |_| buffer.revoke(DeviceId(1)).unwrap());
    table.line("grant again", |_| buffer.grant(DeviceId(1), ReadWrite).unwrap());
    table.line("use by the peer", |_| drop(buffer.use_on(&far).unwrap()));
    table.line("one chunk on the peer", |_| {
        buffer.commit_from(DeviceId(1).into(), 8 * MIB..10 * MIB).unwrap()
    });
    let hold = table.machine.hold(&stream).unwrap();
    drop(buffer.use_on(&stream).unwrap());
    table.line("shrink by 1, a user is held", |_| buffer.shrink_to(8 * MIB).unwrap());
    table.line("shrink by 2 more", |_| buffer.shrink_to(4 * MIB).unwrap());
    table.line("grow at once by those 2", |_| buffer.grow_to(8 * MIB).unwrap());
    hold.release().unwrap();
    table.line("use, the earlier user is done", |_| drop(buffer.use_on(&stream).unwrap()));
    table.line("figures and pieces", |_| (buffer.stats(), buffer.pieces(), pool.stats()));
    table.line("drop", |_| drop(buffer));
}

fn guard_mode(table: &mut Table) {
    table.chapter("Guard mode: each block in mappings of its own");
    let (_pool, lane) = table.lane(|builder| builder.debug_mode(DebugMode::Guard));
    let buffer = table.line("first 1000 bytes", |_| alloc(&lane, 1000));
    table.line("free", |_| drop(buffer));
    let buffer = table.line("1000 bytes again", |_| alloc(&lane, 1000));
    table.line("free", |_| drop(buffer));
    let mut buffer = table.line("5 MiB", |_| alloc(&lane, 5 * MIB));
    let other = table.stream();
    buffer.record_stream(&other).unwrap();
    table.line("free with one recorded stream", |_| drop(buffer));
}

fn table() -> String {
    let machine = Machine::simulated(MachineSpec::default());
    let mut table = Table { text: String::new(), machine };
    open_and_end(&mut table);
    cold_and_warm(&mut table);
    growth(&mut table);
    limbo(&mut table);
    moves(&mut table);
    shortage(&mut table);
    placements(&mut table);
    elastic(&mut table);
    guard_mode(&mut table);
    table.text
}

#[test]
fn the_table_is_as_it_was() {
    if any_driver() == DriverChoice::Cuda {
        println!("the_table_is_as_it_was: skipped: made on the simulated device only");
        return;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/driver_calls.txt");
    let made = table();
    assert_eq!(made, table(), "the table is not the same twice");
    if std::env::var_os("VMM_UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, made).unwrap();
        return;
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    let differs =
        made.lines().zip(known.lines().chain(std::iter::repeat(""))).find(|(a, b)| a != b);
    if let Some((made, known)) = differs {
        panic!("made:  {made}\nknown: {known}\nVMM_UPDATE_GOLDEN=1 writes the table anew");
    }
    assert_eq!(made.lines().count(), known.lines().count(), "the file has more lines");
}

#[test]
fn what_is_warm_makes_no_call() {
    // Said apart from the table, so that no update of it can take the law away.
    let made = table();
    for operation in ["warm free", "warm 2 MiB", "second small request", "zero bytes", "too large"]
    {
        let line = made.lines().find(|line| line.trim_start().starts_with(operation)).unwrap();
        assert!(line.ends_with(": no driver call"), "{line}");
    }
}
