//! Buffers of another process, whose part an owner of this process plays on a machine of its own.

use std::ffi::CString;
use std::fmt::Write as _;
use std::ptr;
use std::sync::Arc;

use vmm_pool_capi::*;
use vmm_share::retry_leftovers;
use vmm_sys::Driver;
use vmm_sys::sim::Sim;

use super::{Place, machine, told};
use crate::engine::{Case, Done, Scene, check_mode, give_back};
use crate::share::{Between, offered};
use crate::stage::{G, SOON};

struct Importing {
    /// The owner.
    between: Between,
    /// The importer's machine, whose calls fail.
    sim: Arc<Sim>,
    importer: *mut VmmImporter,
    imports: Vec<*mut VmmImport>,
}

fn connect(it: &mut Importing) -> Done {
    let address = CString::new(it.between.address.to_string()).unwrap();
    let (patience_us, mut place) = (SOON.as_micros() as u64, Place::new());
    // SAFETY: a text, and a live place for the answer.
    let answer =
        told(unsafe { vmm_import_connect(address.as_ptr(), patience_us, &raw mut place.0) });
    it.importer = place.of(answer)?;
    Ok(())
}

fn open(it: &mut Importing) -> Done {
    let mut place = Place::new();
    // SAFETY: as above.
    let answer = told(unsafe {
        vmm_import_open(it.importer, c"buffer".as_ptr(), VMM_ACCESS_READ, &raw mut place.0)
    });
    it.imports.push(place.of(answer)?);
    Ok(())
}

fn alone() -> Importing {
    Importing { between: offered(), sim: machine(), importer: ptr::null_mut(), imports: Vec::new() }
}

fn connected() -> Importing {
    let mut it = alone();
    connect(&mut it).unwrap();
    it
}

fn imported() -> Importing {
    let mut it = connected();
    open(&mut it).unwrap();
    it
}

impl Importing {
    fn info(&self, import: *mut VmmImport) -> VmmImportInfo {
        // SAFETY: every bit pattern is a value.
        let mut info: VmmImportInfo = unsafe { std::mem::zeroed() };
        info.struct_bytes = size_of::<VmmImportInfo>() as u32;
        // SAFETY: a live place of the length that it says.
        told(unsafe { vmm_import_info(import, &raw mut info) }).unwrap();
        info
    }

    /// What is mapped is what the owner has.
    fn check(&self) {
        for import in &self.imports {
            let info = self.info(*import);
            assert_eq!(info.state, VMM_IMPORT_CURRENT);
            for piece in self.between.buffer().pieces() {
                let found = self.sim.peek(info.address + piece.offset, 1);
                assert_eq!(found, Some(vec![(piece.address / G) as u8]), "at {}", piece.offset);
            }
        }
    }

    fn give_all_back(&mut self) -> Done {
        self.imports.drain(..).try_for_each(|it| told(vmm_import_close(it)))?;
        match self.importer.is_null() {
            true => Ok(()),
            false => told(vmm_import_disconnect(self.importer)),
        }
    }
}

impl Scene for Importing {
    fn sim(&self) -> Arc<Sim> {
        self.sim.clone()
    }

    fn sims(&self) -> Vec<Arc<Sim>> {
        let mut sims = self.between.sims();
        sims.push(self.sim.clone());
        sims
    }

    fn settle(&self) {
        self.between.settle();
    }

    fn picture(&self, exact: bool) -> String {
        let mut text = self.between.picture(exact);
        for import in &self.imports {
            let info = self.info(*import);
            let _ = writeln!(text, "import {:#x} {}", info.address, info.state);
            // One whose way back was refused too lacks pieces until it is refreshed, and says so.
            if exact {
                let bytes = (0..info.bytes).step_by(G as usize);
                let held: Vec<_> = bytes.map(|at| self.sim.peek(info.address + at, 16)).collect();
                let _ = writeln!(text, "{} {} {held:?}", info.generation, info.bytes);
            }
        }
        if exact {
            let ledger = self.sim.ledger_summary();
            let counts = (ledger.handles, ledger.mappings, ledger.ranges, ledger.streams);
            let _ = writeln!(text, "the importer's machine: {counts:?}");
        }
        text
    }

    fn laws(&self) -> Result<(), String> {
        let driver: Arc<dyn Driver> = self.sim.clone();
        check_mode(&driver)?;
        self.between.laws()
    }

    fn end(mut self) -> Result<(), String> {
        self.give_all_back().map_err(|error| error.to_string())?;
        let left = retry_leftovers();
        if left > 0 {
            return Err(format!("{left} imports are left"));
        }
        let driver: Arc<dyn Driver> = self.sim;
        give_back(&driver)?;
        self.between.end()
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("c::connect", &["vmm_import_connect"], alone, connect, |it| {
            assert!(!it.importer.is_null());
        }),
        Case::new("c::open", &["vmm_import_open"], connected, open, Importing::check),
        Case::new(
            "c::refresh",
            &["vmm_import_refresh"],
            || {
                let it = imported();
                it.between.change();
                it
            },
            |it| told(vmm_import_refresh(it.imports[0], SOON.as_micros() as u64)),
            Importing::check,
        ),
        Case::new(
            "c::close",
            &["vmm_import_close", "vmm_import_disconnect"],
            imported,
            |it| {
                it.give_all_back()?;
                it.importer = ptr::null_mut();
                Ok(())
            },
            |_| {
                retry_leftovers();
            },
        )
        .quiet(),
    ]
}
