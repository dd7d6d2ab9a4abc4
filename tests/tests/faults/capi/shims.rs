//! What PyTorch and CuPy call, over the process's own pool of a device.

use std::ffi::CStr;
use std::ptr;

use vmm_pool_capi::{pool, vmm_pool_last_status, vmm_pool_status};
use vmm_pool_cupy::*;
use vmm_pool_torch::*;

use super::{Border, heard, nothing, raw, told};
use crate::engine::{Case, Done};
use crate::stage::{G, HOME};

/// The own pool of the first device.
fn own() -> Border {
    let mut it = nothing();
    it.stage.pool = Some(pool(HOME).unwrap());
    it.stage.keeps = true;
    it
}

/// Two blocks of the first stream.
fn two() -> Border {
    let mut it = own();
    alloc(&mut it, 0, 3 * G).unwrap();
    alloc(&mut it, 0, 2 * G).unwrap();
    it
}

/// An address, or why there is none.
fn given(address: u64) -> Result<u64, Box<dyn std::error::Error>> {
    match address {
        0 => told(vmm_pool_last_status()).and(Err("NULL without a status".into())),
        address => Ok(address),
    }
}

/// An answer of 0 or -1.
fn done(answer: i32) -> Done {
    match answer {
        0 => Ok(()),
        _ => told(vmm_pool_last_status()).and(Err("a failure without a status".into())),
    }
}

fn alloc(it: &mut Border, stream: usize, bytes: u64) -> Done {
    let stream = raw(&it.stage.streams[stream]);
    // SAFETY: the stream is alive, and said to be gone at the end.
    let block = unsafe { vmm_pool_torch_alloc(bytes as isize, 0, stream) };
    let address = given(block.addr() as u64)?;
    it.stage.pool = Some(pool(HOME)?);
    it.stage.mark(address);
    it.stage.raw.push((address, bytes));
    Ok(())
}

fn free(it: &mut Border, stream: usize) -> Done {
    let Some(&(address, bytes)) = it.stage.raw.last() else { return Ok(()) };
    let (block, stream) =
        (ptr::without_provenance_mut(address as usize), raw(&it.stage.streams[stream]));
    // SAFETY: as above; no work uses the block.
    heard(|| unsafe { vmm_pool_torch_free(block, bytes as isize, 0, stream) })?;
    it.stage.raw.pop();
    Ok(())
}

fn begin(it: &mut Border) -> Done {
    // SAFETY: as above.
    let graph = unsafe { vmm_pool_torch_capture_begin(0, raw(&it.stage.streams[0]), 0) };
    it.graphs.push(given(graph)?);
    Ok(())
}

fn join(it: &Border, graph: u64) -> Done {
    // SAFETY: as above.
    done(unsafe { vmm_pool_torch_capture_join(graph, 0, raw(&it.stage.streams[1])) })
}

/// A graph that has a block.
fn captured() -> Border {
    let mut it = two();
    begin(&mut it).unwrap();
    alloc(&mut it, 0, 4 * G).unwrap();
    done(vmm_pool_torch_capture_end(it.graphs[0])).unwrap();
    free(&mut it, 0).unwrap();
    it
}

fn cupy_alloc(it: &mut Border, bytes: u64) -> Done {
    let block = vmm_pool_cupy_malloc(ptr::null_mut(), bytes as usize, 0);
    it.cupy.push(given(block.addr() as u64)?);
    it.stage.pool = Some(pool(HOME)?);
    Ok(())
}

fn cupy_free(it: &mut Border) -> Done {
    let Some(&address) = it.cupy.last() else { return Ok(()) };
    let block = ptr::without_provenance_mut(address as usize);
    heard(|| vmm_pool_cupy_free(ptr::null_mut(), block, 0))?;
    it.cupy.pop();
    Ok(())
}

/// A block of CuPy's, and one that is put aside.
fn cupy_two() -> Border {
    let mut it = own();
    cupy_alloc(&mut it, 3 * G).unwrap();
    cupy_alloc(&mut it, 2 * G).unwrap();
    cupy_free(&mut it).unwrap();
    it.aside = true;
    it
}

pub(super) fn cases() -> Vec<Case> {
    [torch(), questions(), graphs(), cupy()].into_iter().flatten().collect()
}

fn torch() -> Vec<Case> {
    vec![
        Case::new(
            "torch::first_alloc",
            &["vmm_pool_torch_alloc"],
            nothing,
            |it| alloc(it, 0, 3 * G),
            |it| assert_eq!(it.stage.raw.len(), 1),
        ),
        Case::new(
            "torch::alloc",
            &["vmm_pool_torch_alloc"],
            two,
            |it| alloc(it, 0, 5 * G),
            |it| assert_eq!(it.stage.raw.len(), 3),
        ),
        Case::new(
            "torch::free",
            &["vmm_pool_torch_free"],
            two,
            |it| free(it, 1).and_then(|()| free(it, 0)),
            |it| assert!(it.stage.raw.is_empty()),
        ),
        Case::new(
            "torch::record_stream",
            &["vmm_pool_torch_record_stream"],
            two,
            |it| {
                let block = ptr::without_provenance_mut(it.stage.raw[0].0 as usize);
                let stream = raw(&it.stage.streams[1]);
                // SAFETY: the stream is alive, and said to be gone at the end.
                heard(|| unsafe { vmm_pool_torch_record_stream(block, stream) })
            },
            |_| {},
        ),
        Case::new(
            "torch::empty_cache",
            &["vmm_pool_torch_empty_cache", "vmm_pool_torch_reset"],
            || {
                let mut it = two();
                free(&mut it, 0).unwrap();
                it
            },
            |_| {
                heard(|| vmm_pool_torch_empty_cache())?;
                heard(|| vmm_pool_torch_reset())
            },
            |it| assert_eq!(it.stage.pool().device_stats(HOME).unwrap().idle_bytes, 0),
        ),
        Case::new(
            "torch::stream_destroyed",
            &["vmm_pool_torch_stream_destroyed"],
            || {
                let mut it = two();
                free(&mut it, 1).unwrap();
                it
            },
            |it| {
                for stream in [1, 0] {
                    let stream = raw(&it.stage.streams[stream]);
                    // SAFETY: it is alive.
                    heard(|| unsafe { vmm_pool_torch_stream_destroyed(0, stream) })?;
                }
                Ok(())
            },
            |it| assert_eq!(it.stage.raw.len(), 1),
        ),
    ]
}

fn questions() -> Vec<Case> {
    vec![
        Case::silent("torch::init", &["vmm_pool_torch_init"], nothing, |_| {
            heard(|| vmm_pool_torch_init(2))
        }),
        Case::silent("torch::base_alloc", &["vmm_pool_torch_base_alloc"], two, |it| {
            let (address, bytes) = it.stage.raw[0];
            let (block, mut size) = (ptr::without_provenance_mut(address as usize), 0);
            // SAFETY: a live place for the answer.
            let base = unsafe { vmm_pool_torch_base_alloc(block, &raw mut size) };
            assert_eq!((base.addr() as u64, size as u64), (address, bytes));
            Ok(())
        }),
        Case::new(
            "torch::memory_fraction",
            &["vmm_pool_torch_memory_fraction"],
            own,
            |_| told(vmm_pool_torch_memory_fraction(0.0, 0)),
            |it| {
                let stream = raw(&it.stage.streams[0]);
                // SAFETY: the stream is alive, and said to be gone at the end.
                let block = unsafe { vmm_pool_torch_alloc(G as isize, 0, stream) };
                assert!(block.is_null());
                let short = vmm_pool_status::VMM_POOL_OUT_OF_MEMORY as i32;
                assert_eq!(vmm_pool_last_status(), short);
            },
        ),
        Case::new(
            "torch::texts",
            &["vmm_pool_torch_stats_json", "vmm_pool_torch_report"],
            two,
            |_| {
                for text in [vmm_pool_torch_stats_json(0), vmm_pool_torch_report(0)] {
                    given(text.addr() as u64)?;
                }
                // SAFETY: valid until the next text.
                let report = unsafe { CStr::from_ptr(vmm_pool_torch_report(0)) };
                assert!(report.to_str()?.contains("the pool holds"));
                Ok(())
            },
            |_| {},
        ),
    ]
}

fn graphs() -> Vec<Case> {
    vec![
        Case::new(
            "torch::capture_first",
            &["vmm_pool_torch_capture_begin"],
            nothing,
            begin,
            |it| assert_eq!(it.graphs.len(), 1),
        ),
        Case::new(
            "torch::capture",
            &["vmm_pool_torch_capture_join", "vmm_pool_torch_capture_end"],
            || {
                let mut it = two();
                begin(&mut it).unwrap();
                it
            },
            |it| {
                let graph = it.graphs[0];
                join(it, graph)?;
                done(vmm_pool_torch_capture_end(graph))
            },
            |_| {},
        ),
        Case::new(
            "torch::launched_on",
            &["vmm_pool_torch_graph_launched_on"],
            captured,
            |it| {
                let stream = raw(&it.stage.streams[1]);
                // SAFETY: the stream is alive for longer than the graph.
                done(unsafe { vmm_pool_torch_graph_launched_on(it.graphs[0], 0, stream) })
            },
            |_| {},
        ),
        Case::new(
            "torch::graph_destroyed",
            &["vmm_pool_torch_graph_destroyed"],
            captured,
            |it| {
                done(vmm_pool_torch_graph_destroyed(it.graphs[0]))?;
                it.graphs.clear();
                Ok(())
            },
            |it| {
                it.stage.pool().trim(HOME).unwrap();
                assert_eq!(it.stage.pool().device_stats(HOME).unwrap().private_bytes, 0);
            },
        )
        .quiet(),
    ]
}

fn cupy() -> Vec<Case> {
    vec![
        Case::new(
            "cupy::first_malloc",
            &["vmm_pool_cupy_malloc"],
            nothing,
            |it| cupy_alloc(it, 3 * G),
            |it| assert_eq!(it.cupy.len(), 1),
        ),
        Case::new(
            "cupy::malloc",
            &["vmm_pool_cupy_malloc"],
            cupy_two,
            |it| cupy_alloc(it, 5 * G),
            |it| assert_eq!(it.cupy.len(), 2),
        ),
        Case::silent("cupy::free", &["vmm_pool_cupy_free"], cupy_two, cupy_free),
        Case::new(
            "cupy::synchronize",
            &["vmm_pool_cupy_synchronize"],
            cupy_two,
            |_| told(vmm_pool_cupy_synchronize(0)),
            |it| assert_eq!(it.stage.pool().device_stats(HOME).unwrap().buffers, 1),
        ),
    ]
}
