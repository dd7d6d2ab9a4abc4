//! Every operation, while the k-th driver call fails: cudarc's own and the pool's, once and for ever.
//!
//! Nothing panics or hangs, an error has the code, and the call unless it is cudarc's own answer; after an
//! error all is as before, the retry works, and in the end the driver has everything back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, PushKernelArg};
use vmm_pool_cudarc::{CudaPool, ElasticSlice, PoolSlice};
use vmm_sys::ResultCode;
use vmm_sys::object::retry_failed_drops;

use crate::common::{Kernels, StandIn, go, in_children};

const N: usize = 64;
const N_ARG: u64 = N as u64;
const CHUNK: usize = (2 << 20) / 4;
/// A cell that takes longer hangs.
const HANGS_AFTER: Duration = Duration::from_secs(60);

type Done = Result<(), Box<dyn std::error::Error>>;

/// What all cells share.
struct Rig {
    contexts: [Arc<CudaContext>; 2],
    kernels: Kernels,
    standin: StandIn,
}

/// Fields drop in this order.
struct Scene {
    slices: Vec<PoolSlice<u32>>,
    elastic: Option<ElasticSlice<u32>>,
    copy: CudaSlice<u32>,
    pool: Option<CudaPool>,
    /// Two of the first device, one of the second.
    streams: [Arc<CudaStream>; 3],
}

struct Operation {
    name: &'static str,
    make: fn(&Rig) -> Scene,
    act: fn(&Rig, &mut Scene) -> Done,
    check: fn(&Scene),
}

fn build(rig: &Rig, scene: &mut Scene) -> Done {
    let builder = CudaPool::builder().context(&rig.contexts[0]).context(&rig.contexts[1]);
    // Without a thread, so that runs repeat.
    let pool = builder.share().configure(|it| it.background(false)).build()?;
    scene.pool = Some(pool);
    Ok(())
}

fn bare(rig: &Rig) -> Scene {
    let streams = [0, 0, 1].map(|at: usize| rig.contexts[at].new_stream().unwrap());
    let copy = streams[0].clone_htod(&[9_u32; N]).unwrap();
    Scene { slices: Vec::new(), elastic: None, copy, pool: None, streams }
}

fn pooled(rig: &Rig) -> Scene {
    let mut scene = bare(rig);
    build(rig, &mut scene).unwrap();
    scene
}

/// A slice of the first stream, with numbers in it.
fn filled(rig: &Rig) -> Scene {
    let mut scene = pooled(rig);
    let slice = scene.pool().clone_htod(&scene.streams[0], &[1_u32; N]).unwrap();
    scene.slices.push(slice);
    scene.streams[0].synchronize().unwrap();
    scene
}

/// An elastic slice, with numbers in it.
fn elastic(rig: &Rig) -> Scene {
    let mut scene = pooled(rig);
    let mut elastic = scene.pool().elastic::<u32>(&scene.streams[0], 4 * CHUNK).unwrap();
    elastic.grow_zeros(CHUNK).unwrap();
    scene.elastic = Some(elastic);
    scene.streams[0].synchronize().unwrap();
    scene
}

impl Scene {
    fn pool(&self) -> &CudaPool {
        self.pool.as_ref().unwrap()
    }

    fn elastic(&mut self) -> &mut ElasticSlice<u32> {
        self.elastic.as_mut().unwrap()
    }

    fn keep(&mut self, made: Result<PoolSlice<u32>, vmm_pool_cudarc::Error>) -> Done {
        self.slices.push(made?);
        Ok(())
    }

    /// What a failure must leave as it was.
    fn picture(&self) -> String {
        let Some(pool) = &self.pool else { return String::new() };
        let stats = pool.pool().stats().devices;
        let books: Vec<_> =
            stats.iter().map(|(_, it)| (it.live_bytes, it.elastic_bytes, it.buffers)).collect();
        let held: Vec<_> = self.slices.iter().map(read).collect();
        let elastic = self.elastic.as_ref().map(|it| (it.len(), it.buffer().committed_bytes()));
        format!("{books:?} {held:?} {elastic:?}")
    }
}

fn read(slice: &PoolSlice<u32>) -> Vec<u32> {
    slice.context().synchronize().unwrap();
    slice.stream().clone_dtoh(slice).unwrap()
}

fn allocations() -> Vec<Operation> {
    vec![
        Operation { name: "build", make: bare, act: build, check: |it| assert!(it.pool.is_some()) },
        Operation {
            name: "first alloc",
            make: pooled,
            act: |_, it| it.keep(it.pool().alloc_zeros(&it.streams[0], N)),
            check: |it| assert_eq!(read(&it.slices[0]), [0; N]),
        },
        Operation {
            name: "alloc more",
            make: filled,
            act: |_, it| it.keep(it.pool().alloc_zeros(&it.streams[0], 3 * CHUNK)),
            check: |it| assert_eq!(it.slices.len(), 2),
        },
        Operation {
            name: "clone_htod",
            make: filled,
            act: |_, it| it.keep(it.pool().clone_htod(&it.streams[1], &[2; N])),
            check: |it| assert_eq!(read(&it.slices[1]), [2; N]),
        },
        Operation {
            name: "try_clone",
            make: filled,
            act: |_, it| it.keep(it.slices[0].try_clone()),
            check: |it| assert_eq!(read(&it.slices[1]), [1; N]),
        },
        Operation {
            name: "close",
            make: filled,
            act: |_, it| {
                // Whether the stream may go is no failure.
                it.slices.clear();
                it.pool().close(&it.streams[0]);
                Ok(())
            },
            check: |it| assert!(it.pool().lane(&it.streams[0]).is_ok()),
        },
    ]
}

fn uses() -> Vec<Operation> {
    vec![
        Operation {
            name: "read on another stream",
            make: filled,
            act: |rig, it| {
                let (from, to) = (&it.slices[0], &mut it.copy);
                let mut launch = it.streams[1].launch_builder(&rig.kernels.copy);
                Ok(go(launch.arg(to).arg(from).arg(&N_ARG))?)
            },
            check: |it| {
                it.streams[1].synchronize().unwrap();
                assert_eq!(it.streams[1].clone_dtoh(&it.copy).unwrap(), [1; N]);
            },
        },
        Operation {
            name: "view on another device",
            make: filled,
            act: |_, it| {
                let view = it.slices[0].on(&it.streams[2])?;
                assert_eq!(it.streams[2].clone_dtoh(&view)?, [1; N]);
                Ok(())
            },
            check: |_| {},
        },
        Operation {
            name: "write on another device",
            make: filled,
            act: |_, it| {
                let mut view = it.slices[0].on_mut(&it.streams[2])?;
                // The same bytes, so that a failure after it leaves the same too.
                Ok(it.streams[2].memcpy_htod(&[1; N], &mut view)?)
            },
            check: |it| assert_eq!(read(&it.slices[0]), [1; N]),
        },
        Operation {
            name: "drop what two streams and a device have read",
            make: |rig| {
                let mut it = filled(rig);
                let mut launch = it.streams[1].launch_builder(&rig.kernels.copy);
                go(launch.arg(&mut it.copy).arg(&it.slices[0]).arg(&N_ARG)).unwrap();
                drop(it.slices[0].on(&it.streams[2]).unwrap());
                it
            },
            act: |_, it| {
                it.slices.clear();
                Ok(())
            },
            check: |it| assert_eq!(it.pool().pool().stats().devices[0].1.buffers, 0),
        },
    ]
}

fn elastics() -> Vec<Operation> {
    vec![
        Operation {
            name: "reserve",
            make: pooled,
            act: |_, it| {
                it.elastic = Some(it.pool().elastic(&it.streams[0], 4 * CHUNK)?);
                Ok(())
            },
            check: |it| assert!(it.elastic.is_some()),
        },
        Operation {
            name: "grow_zeros",
            make: elastic,
            act: |_, it| Ok(it.elastic().grow_zeros(3 * CHUNK)?),
            check: |it| assert_eq!(it.elastic.as_ref().unwrap().len(), 3 * CHUNK),
        },
        Operation {
            name: "shrink",
            make: elastic,
            act: |_, it| Ok(it.elastic().shrink(0)?),
            check: |it| assert_eq!(it.elastic.as_ref().unwrap().len(), 0),
        },
        Operation {
            name: "views of an elastic slice",
            make: elastic,
            act: |_, it| {
                let stream = it.streams[1].clone();
                stream.memset_zeros(&mut it.elastic().view_mut(&stream)?)?;
                let guest = it.streams[2].clone();
                let found = guest.clone_dtoh(&it.elastic().view(&guest)?)?;
                assert!(found.iter().all(|it| *it == 0));
                Ok(())
            },
            check: |_| {},
        },
        Operation {
            name: "drop an elastic slice",
            make: |rig| {
                let mut it = elastic(rig);
                let stream = it.streams[1].clone();
                drop(it.elastic().view(&stream).unwrap());
                it
            },
            act: |_, it| {
                it.elastic = None;
                Ok(())
            },
            check: |it| assert!(it.pool().pool().elastic_stats().is_empty()),
        },
    ]
}

/// One cell, or a run without a fault: the calls that failed, or all; and whether the operation did.
fn cell(rig: &Rig, operation: &Operation, fault: Option<(u64, u64, u32)>) -> (Vec<String>, bool) {
    let live = rig.standin.live();
    let mut scene = (operation.make)(rig);
    let before = scene.picture();
    let (at, times, code) = fault.unwrap_or((1, u64::MAX, 0));
    rig.standin.fail(at, times, code);
    let outcome = (operation.act)(rig, &mut scene);
    let hit = rig.standin.failed();
    rig.standin.fail(1, 0, 0);
    // What had nobody to tell is in the context, for cudarc's next call.
    for context in &rig.contexts {
        let _told = context.check_err();
    }
    let is_refused = outcome.is_err();
    if let Err(error) = outcome {
        check_text(&error.to_string(), &hit, ResultCode(code));
        assert_eq!(before, scene.picture(), "changed by an operation that failed: {error}");
        (operation.act)(rig, &mut scene).expect("the retry");
    }
    (operation.check)(&scene);
    let driver = scene.pool().pool().driver().clone();
    scene.pool().pool().verify().unwrap();
    drop(scene);
    assert_eq!(retry_failed_drops(&driver), 0, "what the driver refused to take back");
    drop(driver);
    assert!(rig.contexts.iter().all(|context| context.check_err().is_ok()));
    // What cudarc itself destroys is gone for it, whatever the driver answers.
    let lost = hit.iter().filter(|call| call.contains("Destroy")).count() as u64;
    let lost = if fault.is_some() { lost } else { 0 };
    let now = rig.standin.live();
    assert_eq!(now.0, live.0, "bytes are left");
    assert!(now.1 <= live.1 + lost, "{} objects are left of {}", now.1, live.1);
    (hit, is_refused)
}

/// The error has the code, and the call unless cudarc made it, which does not know.
fn check_text(text: &str, hit: &[String], code: ResultCode) {
    assert!(!hit.is_empty(), "refused before the fault: {text}");
    assert!(text.contains(code.name().unwrap()), "no {code}: {text}");
    let plain = |call: &str| call.trim_end_matches("_v2").trim_end_matches("_v3").to_owned();
    let is_named = hit.iter().any(|call| text.contains(&plain(call)));
    assert!(is_named || text.contains("cudarc") || text.starts_with("DriverError"), "{text}");
}

/// Ends the process if a cell hangs: nothing else would.
fn watch(at: &'static Mutex<(String, Instant)>) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let (cell, since) = &*at.lock().unwrap();
            if since.elapsed() > HANGS_AFTER {
                eprintln!("HANGS: {cell}");
                std::process::abort();
            }
        }
    });
}

/// Runs all cells, and says which failed.
fn run(operations: Vec<Operation>) {
    let at: &'static _ = Box::leak(Box::new(Mutex::new((String::new(), Instant::now()))));
    watch(at);
    let contexts = [0, 1].map(|at| CudaContext::new(at).unwrap());
    let rig = Rig { kernels: Kernels::load(&contexts[0]), contexts, standin: StandIn::open() };
    let is_whole = std::env::var("VMM_FAULTS").is_ok_and(|text| text == "all");
    let codes = [ResultCode::INVALID_VALUE, ResultCode::OUT_OF_MEMORY, ResultCode::UNKNOWN];
    let (mut cells, mut refused, mut failures) = (0, 0, Vec::new());
    for operation in operations {
        let (calls, _) = cell(&rig, &operation, None);
        for (index, call) in calls.iter().enumerate() {
            let some = if is_whole { &codes[..] } else { &codes[index % 3..=index % 3] };
            for (code, times) in some.iter().flat_map(|code| [(code, 1), (code, u64::MAX)]) {
                let k = index as u64 + 1;
                let name = format!("{} k={k} ({call}) code={} x{times}", operation.name, code.0);
                *at.lock().unwrap() = (name.clone(), Instant::now());
                let played = AssertUnwindSafe(|| cell(&rig, &operation, Some((k, times, code.0))));
                cells += 1;
                match catch_unwind(played) {
                    Ok((_, is_refused)) => refused += u64::from(is_refused),
                    Err(_) => failures.push(name),
                }
                rig.standin.fail(1, 0, 0);
            }
        }
    }
    println!("{cells} cells, {refused} refused");
    assert!(cells > 0 && refused > 0);
    assert!(failures.is_empty(), "{} of {cells}:\n{}", failures.len(), failures.join("\n"));
}

in_children! {
    fn whatever_call_fails_slices_are_as_they_were() {
        run([allocations(), uses()].into_iter().flatten().collect());
    }

    fn whatever_call_fails_elastic_slices_are_as_they_were() {
        run(elastics());
    }
}
