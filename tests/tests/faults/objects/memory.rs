//! Chunks, ranges and mappings.

use std::os::fd::AsFd;
use std::sync::Arc;

use vmm_sys::AccessGrant;
use vmm_sys::object::{Chunk, Latch, Mapping, Range, failed_drops};

use super::{check_bytes, empty, full, props, range};
use crate::engine::Case;
use crate::stage::{G, HOME, NEXT};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "object::chunk",
            &["Chunk::create"],
            empty,
            |bench| {
                bench.chunks.push(Chunk::create(&bench.driver, G, &props())?);
                Ok(())
            },
            |bench| assert_eq!(bench.sim.ledger_summary().chunks, 1),
        ),
        Case::new(
            "object::chunk_release",
            &["Chunk::release"],
            full,
            |bench| match bench.chunks.pop().unwrap().release() {
                Ok(()) => Ok(()),
                Err((chunk, error)) => {
                    bench.chunks.push(chunk);
                    Err(error.into())
                }
            },
            |bench| assert_eq!(bench.sim.ledger_summary().chunks, 3),
        ),
        Case::new(
            "object::export_import",
            &["Chunk::export_fd", "Chunk::import_fd"],
            full,
            |bench| {
                let descriptor = bench.chunks[0].export_fd()?;
                drop(Chunk::import_fd(&bench.driver, descriptor.as_fd(), G, &props())?);
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::range",
            &["Range::reserve"],
            empty,
            |bench| {
                bench.ranges.push(Range::reserve(&bench.driver, 4 * G, G, 0)?);
                Ok(())
            },
            |bench| assert_eq!(range(bench).bytes(), 4 * G),
        ),
        Case::new(
            "object::map",
            &["Mapping::map", "Mapping::set_access"],
            full,
            |bench| {
                let chunk = Chunk::create(&bench.driver, G, &props())?;
                let mapping = Mapping::map(range(bench), 3 * G, Arc::new(chunk))?;
                mapping.set_access(&[AccessGrant::read_write(HOME)])?;
                bench.mappings.push(mapping);
                Ok(())
            },
            |bench| range(bench).write(HOME, 3 * G, &[9]).unwrap(),
        ),
        Case::new(
            "object::set_access_all",
            &["Mapping::set_access_all"],
            full,
            |bench| {
                let grants = [AccessGrant::read_write(HOME), AccessGrant::read_write(NEXT)];
                Ok(Mapping::set_access_all(&bench.mappings, &grants)?)
            },
            |bench| range(bench).write(NEXT, 2 * G, &[3]).unwrap(),
        ),
        Case::new(
            "object::unmap",
            &["Mapping::unmap"],
            full,
            |bench| match bench.mappings.pop().unwrap().unmap() {
                Ok(chunk) => {
                    bench.chunks.extend(Arc::into_inner(chunk));
                    Ok(())
                }
                Err((mapping, error)) => {
                    bench.mappings.push(mapping);
                    Err(error.into())
                }
            },
            |bench| assert_eq!((bench.mappings.len(), bench.chunks.len()), (2, 2)),
        ),
        Case::new(
            "object::unmap_all",
            &["Mapping::unmap_all"],
            full,
            |bench| match Mapping::unmap_all(std::mem::take(&mut bench.mappings)) {
                Ok(chunks) => {
                    bench.chunks.extend(chunks.into_iter().filter_map(Arc::into_inner));
                    Ok(())
                }
                Err((mappings, error)) => {
                    bench.mappings = mappings;
                    Err(error.into())
                }
            },
            |bench| assert_eq!(bench.chunks.len(), 4),
        ),
        Case::new(
            "object::bytes",
            &["Range::write", "Range::read", "Range::fill", "Range::dma_buf"],
            full,
            |bench| {
                range(bench).write(HOME, 0, &[1; 4])?;
                let mut found = [0; 4];
                range(bench).read(HOME, 0, &mut found)?;
                assert_eq!(found, [1; 4]);
                range(bench).fill(HOME, G, 16, 2)?;
                drop(range(bench).dma_buf(HOME, 0, 2 * G)?);
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::copies",
            &[
                "Range::copy_on",
                "Mapping::copy_from",
                "Mapping::copy_from_by_kernel",
                "Mapping::fill",
                "Stream::fill",
                "Stream::copy",
                "Stream::copy_words",
                "Stream::load_kernels",
            ],
            || {
                // A fourth chunk for the copies, so that the three are as they were in any case.
                let mut bench = full();
                let chunk = Chunk::create(&bench.driver, G, &props()).unwrap();
                let mapping = Mapping::map(range(&bench), 3 * G, Arc::new(chunk)).unwrap();
                mapping.set_access(&[AccessGrant::read_write(HOME)]).unwrap();
                bench.ranges[0].fill(HOME, 3 * G, 16, 1).unwrap();
                bench.mappings.push(mapping);
                bench
            },
            |bench| {
                let (stream, target) = (&bench.streams[0], &bench.mappings[3]);
                stream.load_kernels()?;
                range(bench).copy_on(stream, 3 * G, 0, 16)?;
                target.copy_from(&bench.mappings[0], stream)?;
                target.copy_from_by_kernel(&bench.mappings[0], stream)?;
                target.fill(1, stream)?;
                stream.synchronize()?;
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::drops",
            &[
                "Mapping::drop",
                "Chunk::drop",
                "Range::drop",
                "Latch::drop",
                "Event::drop",
                "Stream::drop",
            ],
            || {
                let mut bench = full();
                bench.latches.push(Latch::create(&bench.driver, HOME).unwrap());
                bench
            },
            |bench| {
                bench.mappings.clear();
                bench.chunks.clear();
                bench.ranges.clear();
                bench.latches.clear();
                bench.events.clear();
                bench.streams.clear();
                Ok(())
            },
            |bench| assert_eq!(failed_drops(&bench.driver), []),
        )
        .quiet(),
    ]
}
