//! Contiguous KV caches: sequences whose addresses stay while memory comes, is shared and moves.

use std::ops::Range;
use std::time::{Duration, Instant};

use vmm_kv::{ContiguousCache, Dtype, KvError, KvShape, Lending, Order, Sequence};
use vmm_pool::{Buffer, Place, Pool};
use vmm_sys::object::Stream;
use vmm_sys::{Access, DeviceId, GraphExecHandle, ProbeKernel};

use super::elastic::{capture, counts_up, launch, replay};
use super::moves::pool_of_two;
use super::{G, builder, clean, machine, sound};
use crate::machine::{DriverChoice, Machine, Skip};

const HOME: DeviceId = DeviceId(0);
const AWAY: DeviceId = DeviceId(1);
pub(super) const HOST: Place = Place::HostNuma(0);
const MAX_TOKENS: u64 = 1024;
/// Tokens that fill a chunk, one behind the other.
const CHUNK_TOKENS: u64 = 64;
const LONG: Duration = Duration::from_secs(20);

/// 32 KiB a token.
pub(super) fn shape() -> KvShape {
    KvShape::new(8, 8, 128, Dtype::F16).expect("there is such a model")
}

/// A machine, and a pool that has memory of the host too.
pub(super) fn with_host(choice: DriverChoice) -> Result<(Machine, Pool), Skip> {
    let machine = machine(choice)?;
    let built = builder(&machine).host_memory(0, 64 * G, 0).build();
    Ok((machine, built.map_err(Skip::because)?))
}

/// A pool of six chunks on the device, whose neighbour lends five.
pub(super) fn with_lender(choice: DriverChoice) -> Result<(Machine, Pool), Skip> {
    let (machine, pool) = pool_of_two(choice, |pool| pool.limit_bytes(6 * G).lend(AWAY, 5 * G))?;
    // Where there is no way between the two, nothing can be lent.
    pool.grant(AWAY, HOME, Access::ReadWrite).map_err(Skip::because)?;
    Ok((machine, pool))
}

fn cache(pool: &Pool, stream: &Stream, order: Order, lending: Lending) -> ContiguousCache {
    let builder = ContiguousCache::builder(pool, stream, shape()).max_tokens(MAX_TOKENS);
    let builder = builder.max_sequences(8).order(order).lenders(lending);
    builder.build().expect("addresses are reserved")
}

/// A cache of its own kind for most stories: a token's bytes lie together, and nobody lends.
fn usual(pool: &Pool, stream: &Stream) -> ContiguousCache {
    cache(pool, stream, Order::TokenMajor, Lending::Nobody)
}

/// Where tokens lie in their sequence, and the word that each part begins with: words count up along a
/// sequence's addresses, and differ from branch to branch.
fn parts(
    cache: &ContiguousCache,
    tokens: Range<u64>,
    branch: u32,
) -> impl Iterator<Item = (Range<u64>, u32)> {
    // The longest context is 2^23 words.
    cache.layout().ranges(tokens).map(move |bytes| {
        let word = (branch << 24) + (bytes.start / 4) as u32;
        (bytes, word)
    })
}

/// Kernels that write tokens, under a guard.
fn write(cache: &ContiguousCache, sequence: &Sequence, tokens: Range<u64>, branch: u32) {
    let _using = cache.use_now().expect("the stream may use it");
    for (bytes, value) in parts(cache, tokens, branch) {
        let (dst, words) = (sequence.address() + bytes.start, (bytes.end - bytes.start) / 4);
        launch(cache.stream(), &ProbeKernel::FillWords { dst, words, value });
    }
}

/// Whether the tokens are those that a branch wrote.
fn is_right(cache: &ContiguousCache, sequence: &Sequence, tokens: Range<u64>, branch: u32) -> bool {
    cache.stream().synchronize().expect("no fault");
    let slot = sequence.address() - cache.address();
    parts(cache, tokens, branch).all(|(bytes, word)| {
        let mut found = vec![0; (bytes.end - bytes.start) as usize];
        cache.buffer().read(slot + bytes.start, &mut found).expect("tokens can be read");
        counts_up(&found, word)
    })
}

/// A sequence of so many tokens.
fn written(cache: &ContiguousCache, tokens: u64, branch: u32) -> Sequence {
    let mut sequence = cache.open(0).expect("it is opened");
    assert_eq!(sequence.append(tokens).expect("there is memory"), 0);
    write(cache, &sequence, 0..tokens, branch);
    sequence
}

fn check_sound(pool: &Pool, cache: &ContiguousCache) {
    cache.settle().expect("nothing else is under way");
    cache.verify().expect("the walker finds nothing");
    assert!(cache.stats().adds_up(), "{:?}", cache.stats());
    pool.verify().expect("the walker finds nothing");
}

/// The sequences are gone: the cache's memory goes back.
fn end(pool: &Pool, cache: ContiguousCache) {
    assert_eq!((cache.stats().sequences, cache.stats().tokens), (0, 0));
    check_sound(pool, &cache);
    cache.release_idle(0).expect("nothing else is under way");
    assert_eq!(cache.stats().committed_bytes, 0);
    drop(cache);
    pool.trim(HOME).expect("the device is trimmed");
    let after = sound(pool);
    assert_eq!((after.elastic_bytes, after.limbo_bytes), (0, 0), "{after:?}");
}

pub(super) fn a_sequence_grows_token_by_token(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (super::pool(&machine), machine.stream(0));
    for order in [Order::TokenMajor, Order::LayerMajor] {
        let cache = cache(&pool, &stream, order, Lending::Nobody);
        let mut sequence = written(&cache, 100, 1);
        let address = sequence.address();
        for token in 100..300 {
            assert_eq!(sequence.append(1).expect("there is memory"), token);
            write(&cache, &sequence, token..token + 1, 1);
        }
        assert!(is_right(&cache, &sequence, 0..300, 1), "{order:?}");
        assert_eq!((sequence.address(), sequence.tokens()), (address, 300));
        check_sound(&pool, &cache);
        drop(sequence);
        end(&pool, cache);
    }
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn memory_comes_ahead_of_the_tokens(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (super::pool(&machine), machine.stream(0));
    let cache = usual(&pool, &stream);
    let mut sequence = written(&cache, CHUNK_TOKENS, 1);
    let begun = Instant::now();
    while sequence.committed_tokens() < 2 * CHUNK_TOKENS {
        assert!(begun.elapsed() < LONG, "the thread brings nothing: {:?}", cache.stats());
        std::thread::yield_now();
    }
    let waited = cache.stats().foreground_growths;
    for token in CHUNK_TOKENS..2 * CHUNK_TOKENS {
        assert_eq!(sequence.append(1).expect("there is memory"), token);
        write(&cache, &sequence, token..token + 1, 1);
    }
    let stats = cache.stats();
    assert_eq!(stats.foreground_growths, waited, "nobody waited for memory");
    assert!(stats.background_growths > 0, "{stats:?}");
    assert!(is_right(&cache, &sequence, 0..2 * CHUNK_TOKENS, 1));
    drop(sequence);
    end(&pool, cache);
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn forks_go_their_own_ways(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (super::pool(&machine), machine.stream(0));
    let cache = usual(&pool, &stream);
    let mut parent = written(&cache, 100, 1);
    let mut child = parent.fork().expect("it forks");
    assert!(cache.stats().shared_bytes > 0, "{:?}", cache.stats());
    assert!(is_right(&cache, &child, 0..100, 1));
    // By turns, and nobody waits for the kernels before.
    for token in 100..150 {
        for (branch, sequence) in [(2, &mut parent), (3, &mut child)] {
            assert_eq!(sequence.append(1).expect("there is memory"), token);
            write(&cache, sequence, token..token + 1, branch);
        }
    }
    // Of whole chunks only.
    let mut other = child.fork_at(CHUNK_TOKENS).expect("it forks");
    assert_eq!(other.append(10).expect("there is memory"), CHUNK_TOKENS);
    write(&cache, &other, CHUNK_TOKENS..CHUNK_TOKENS + 10, 4);
    let is_child_right = |child: &Sequence| {
        is_right(&cache, child, 0..100, 1) && is_right(&cache, child, 100..150, 3)
    };
    assert!(is_right(&cache, &parent, 0..100, 1) && is_right(&cache, &parent, 100..150, 2));
    assert!(is_child_right(&child));
    assert!(is_right(&cache, &other, 0..CHUNK_TOKENS, 1));
    assert!(is_right(&cache, &other, CHUNK_TOKENS..CHUNK_TOKENS + 10, 4));
    check_sound(&pool, &cache);
    drop(parent);
    // Somebody else gets its memory.
    let next = written(&cache, 200, 5);
    assert!(is_child_right(&child) && is_right(&cache, &next, 0..200, 5));
    check_sound(&pool, &cache);
    drop((child, other, next));
    end(&pool, cache);
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn a_parked_sequence_comes_back_to_its_addresses(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let (machine, pool) = with_host(choice)?;
    let stream = machine.stream(0);
    let cache = usual(&pool, &stream);
    let (mut one, mut two) = (written(&cache, 200, 1), written(&cache, 100, 2));
    let address = one.address();
    cache.settle().expect("nothing else is under way");
    let before = sound(&pool).elastic_bytes;
    let bytes = one.park(HOST).expect("the host has room");
    assert!(bytes >= 200 * shape().token_bytes(), "{bytes} bytes moved");
    assert_eq!(one.places(), [(HOST, bytes)]);
    assert_eq!(sound(&pool).elastic_bytes, before - bytes);
    assert!(is_right(&cache, &one, 0..200, 1), "on the host");
    assert!(matches!(one.append(1), Err(KvError::Parked)));
    for token in 100..200 {
        assert_eq!(two.append(1).expect("the others go on"), token);
        write(&cache, &two, token..token + 1, 2);
    }
    assert_eq!(one.resume().expect("the device has room"), bytes);
    assert_eq!((one.address(), one.places()), (address, vec![(HOME.into(), bytes)]));
    assert_eq!(one.append(100).expect("it goes on"), 200);
    write(&cache, &one, 200..300, 1);
    assert!(is_right(&cache, &one, 0..300, 1) && is_right(&cache, &two, 0..200, 2));
    check_sound(&pool, &cache);
    drop((one, two));
    end(&pool, cache);
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn a_sequence_goes_on_in_memory_of_the_neighbour(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let (machine, pool) = with_lender(choice)?;
    let stream = machine.stream(0);
    let tokens = 8 * CHUNK_TOKENS;
    let cache = cache(&pool, &stream, Order::TokenMajor, Lending::Places(vec![AWAY.into()]));
    let mut sequence = cache.open(0).expect("it is opened");
    for token in 0..tokens {
        assert_eq!(sequence.append(1).expect("the neighbour has room"), token);
        write(&cache, &sequence, token..token + 1, 1);
    }
    let places: Vec<Place> = sequence.places().into_iter().map(|(place, _)| place).collect();
    assert_eq!(places, [Place::Device(HOME), Place::Device(AWAY)]);
    assert!(is_right(&cache, &sequence, 0..tokens, 1));
    check_sound(&pool, &cache);
    sequence.truncate(0);
    drop(sequence);
    end(&pool, cache);
    pool.trim(AWAY).expect("the device is trimmed");
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

/// A graph that copies the first tokens of a sequence away, and where to.
struct Reader {
    graph: GraphExecHandle,
    found: Buffer,
}

const READ_TOKENS: u64 = 4;

impl Reader {
    fn new(pool: &Pool, cache: &ContiguousCache, sequence: &Sequence) -> Reader {
        let lane = pool.lane(cache.stream()).expect("a lane is opened");
        let bytes = READ_TOKENS * shape().token_bytes();
        let found = lane.alloc(bytes).expect("a block is served");
        let (dst, src, words) = (found.address(), sequence.address(), bytes / 4);
        let graph = capture(cache.stream(), &ProbeKernel::CopyWords { dst, src, words });
        Reader { graph, found }
    }

    /// Writes the tokens as another branch, and says whether the graph reads them.
    fn follows(&self, cache: &ContiguousCache, sequence: &Sequence, branch: u32) -> bool {
        write(cache, sequence, 0..READ_TOKENS, branch);
        replay(cache.buffer(), cache.stream(), self.graph);
        cache.stream().synchronize().expect("no fault");
        let mut bytes = vec![0; self.found.bytes() as usize];
        self.found.read(0, &mut bytes).expect("they can be read");
        counts_up(&bytes, branch << 24)
    }

    fn end(self, machine: &Machine) {
        // SAFETY: the executable is live, done, and not used afterwards.
        unsafe { machine.driver().graph_exec_destroy(HOME, self.graph) }.expect("the graph goes");
    }
}

pub(super) fn graphs_follow_a_sequence_that_grows(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (super::pool(&machine), machine.stream(0));
    let cache = usual(&pool, &stream);
    let mut sequence = written(&cache, READ_TOKENS, 1);
    let reader = Reader::new(&pool, &cache, &sequence);
    for branch in 1..6 {
        assert!(reader.follows(&cache, &sequence, branch), "{branch}");
        sequence.append(2 * CHUNK_TOKENS).expect("there is memory");
    }
    // The graph's first chunk is another's too, and then its own again.
    let mut child = sequence.fork().expect("it forks");
    assert!(reader.follows(&cache, &sequence, 6));
    assert!(is_right(&cache, &child, 0..READ_TOKENS, 6), "they have it in common");
    child.truncate(READ_TOKENS);
    child.append(1).expect("there is memory");
    assert!(reader.follows(&cache, &sequence, 7));
    assert!(is_right(&cache, &child, 0..READ_TOKENS, 6), "it has a chunk of its own");
    reader.end(&machine);
    drop((sequence, child));
    end(&pool, cache);
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn graphs_follow_a_sequence_that_is_parked(choice: DriverChoice) -> Result<(), Skip> {
    let (machine, pool) = with_host(choice)?;
    let stream = machine.stream(0);
    let cache = usual(&pool, &stream);
    let mut sequence = written(&cache, 100, 1);
    let reader = Reader::new(&pool, &cache, &sequence);
    for round in 0..3 {
        assert!(reader.follows(&cache, &sequence, 10 * round + 1), "round {round}");
        sequence.park(HOST).expect("the host has room");
        assert!(reader.follows(&cache, &sequence, 10 * round + 2), "parked, round {round}");
        sequence.resume().expect("the device has room");
        assert!(reader.follows(&cache, &sequence, 10 * round + 3), "back, round {round}");
    }
    assert!(is_right(&cache, &sequence, READ_TOKENS..100, 1));
    reader.end(&machine);
    drop(sequence);
    end(&pool, cache);
    drop((pool, stream));
    clean(&machine);
    Ok(())
}
