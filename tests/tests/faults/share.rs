//! Buffers between processes: an owner and an importer, each with a machine of its own.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmm_pool::ElasticBuffer;
use vmm_share::{
    Access, Address, Exporter, Import, Importer, ImporterOptions, NamedBuffer, Offer, Offered,
    Owner, OwnerClient, retry_leftovers,
};
use vmm_sys::Driver;
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;

use crate::engine::{Case, Scene, check_mode, done, give_back};
use crate::stage::{G, HOME, SOON, Stage, usual};

/// Fields drop in this order.
pub(crate) struct Between {
    imports: Vec<Import>,
    importer: Option<Importer>,
    client: Option<OwnerClient>,
    stream: Stream,
    /// The importer's machine, whose calls fail.
    sim: Arc<Sim>,
    driver: Arc<dyn Driver>,
    pub(crate) address: Address,
    owner: Option<Owner>,
    owner_sim: Arc<Sim>,
    pub(crate) offers: Vec<Offer>,
    exporter: Option<Exporter>,
    buffer: Option<Arc<ElasticBuffer>>,
    pub(crate) stage: Stage,
    /// Whether the owner's machine is the one whose calls fail.
    owner_fails: bool,
}

fn address() -> Address {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("vmm-fault-matrix-{}-{number}.sock", std::process::id());
    Address::Path(std::env::temp_dir().join(name))
}

/// A buffer of four chunks, offered; nobody has connected.
pub(crate) fn offered() -> Between {
    let mut stage = usual();
    stage.outside = true;
    let builder = stage.elastic_builder().exportable(true);
    let buffer = Arc::new(builder.build().unwrap());
    buffer.grow_to(4 * G).unwrap();
    buffer.pieces().iter().for_each(|piece| stage.mark(piece.address));
    // Descriptors are made when somebody asks, so that runs repeat.
    let exporter = Exporter::builder().ahead(false).timeout(SOON).bind(address()).unwrap();
    let offer = exporter.offer("buffer", &buffer, Offered::ReadWrite).unwrap();
    offer.wait_ready(SOON).unwrap();
    let sim = Sim::builder().devices(2).build();
    let driver: Arc<dyn Driver> = sim.clone();
    let owner_sim = Sim::builder().devices(1).build();
    Between {
        imports: Vec::new(),
        importer: None,
        client: None,
        stream: Stream::create(&driver, HOME).unwrap(),
        sim,
        driver,
        address: exporter.address().clone(),
        owner: None,
        owner_sim,
        offers: vec![offer],
        exporter: Some(exporter),
        buffer: Some(buffer),
        stage,
        owner_fails: false,
    }
}

/// Somebody has connected.
fn connected() -> Between {
    let mut between = offered();
    between.importer = Some(Importer::connect(&between.address, between.options()).unwrap());
    between
}

/// And has the buffer.
fn imported() -> Between {
    let mut between = connected();
    let import = between.importer().open_with_room("buffer", Access::ReadWrite, 16 * G).unwrap();
    between.imports.push(import);
    between
}

/// And the owner has changed it since.
fn changed() -> Between {
    let between = imported();
    between.change();
    between
}

/// A process that holds buffers, and a worker of its.
fn owned() -> Between {
    let mut between = offered();
    let sim: Arc<dyn Driver> = between.owner_sim.clone();
    let owner = Owner::builder(sim).timeout(SOON).bind(address()).unwrap();
    let options = between.options();
    between.client = Some(OwnerClient::connect(owner.address(), options).unwrap());
    between.owner = Some(owner);
    between
}

impl Between {
    fn options(&self) -> ImporterOptions {
        ImporterOptions::new(self.driver.clone()).timeout(SOON)
    }

    fn importer(&self) -> &Importer {
        self.importer.as_ref().unwrap()
    }

    fn client(&self) -> &OwnerClient {
        self.client.as_ref().unwrap()
    }

    /// The owner takes memory away, and adds some.
    pub(crate) fn change(&self) {
        self.buffer().shrink_to(3 * G).unwrap();
        self.buffer().grow_to(6 * G).unwrap();
        self.buffer().pieces().iter().for_each(|piece| self.stage.mark(piece.address));
        self.offers[0].wait_ready(SOON).unwrap();
    }

    pub(crate) fn buffer(&self) -> &Arc<ElasticBuffer> {
        self.buffer.as_ref().unwrap()
    }

    fn first(&self) -> &Import {
        &self.imports[0]
    }

    /// Every import of the buffer has the bytes that the owner has.
    fn check(&self) {
        for import in &self.imports {
            let pieces = self.buffer().pieces();
            assert_eq!(import.pieces().len(), pieces.len());
            for piece in pieces {
                let mut found = [0];
                import.read(piece.offset, &mut found).unwrap();
                assert_eq!(found, [(piece.address / G) as u8], "offset {}", piece.offset);
            }
        }
    }
}

impl Scene for Between {
    fn sim(&self) -> Arc<Sim> {
        match self.owner_fails {
            true => self.stage.sim.clone(),
            false => self.sim.clone(),
        }
    }

    fn sims(&self) -> Vec<Arc<Sim>> {
        vec![self.sim.clone(), self.stage.sim.clone(), self.owner_sim.clone()]
    }

    fn settle(&self) {
        self.stage.settle();
        retry_leftovers();
    }

    fn picture(&self, exact: bool) -> String {
        let mut text = self.stage.picture(exact);
        for import in &self.imports {
            let _ = writeln!(text, "import {:#x} {:?}", import.address(), import.check());
            // One whose way back was refused too lacks pieces until it is refreshed, and says so.
            for piece in import.pieces().into_iter().filter(|_| exact) {
                let held = self.sim.peek(piece.address, 16);
                let _ = writeln!(text, "{piece:?} {held:?}");
            }
        }
        if !self.owner_fails && exact {
            let ledger = self.sim.ledger_summary();
            let counts = (ledger.handles, ledger.mappings, ledger.ranges, ledger.streams);
            let _ = writeln!(text, "the importer's machine: {counts:?}");
        }
        text
    }

    fn laws(&self) -> Result<(), String> {
        check_mode(&self.driver)?;
        self.stage.laws()
    }

    fn end(self) -> Result<(), String> {
        let Between { imports, importer, client, stream, driver, owner, .. } = self;
        drop((imports, importer, client));
        drop(stream);
        let left = retry_leftovers();
        if left > 0 {
            return Err(format!("{left} imports are left"));
        }
        drop(owner);
        drop((self.offers, self.exporter, self.buffer));
        give_back(&driver)?;
        let owner: Arc<dyn Driver> = self.owner_sim;
        give_back(&owner)?;
        self.stage.end()
    }
}

fn imports() -> Vec<Case> {
    vec![
        Case::new(
            "share::connect",
            &["Importer::connect"],
            offered,
            |it| {
                it.importer = Some(Importer::connect(&it.address, it.options())?);
                Ok(())
            },
            |it| assert!(it.importer().is_owner_alive()),
        ),
        Case::new(
            "share::open",
            &["Importer::open", "Importer::open_with_room"],
            connected,
            |it| {
                let first = it.importer().open("buffer", Access::Read)?;
                let second = it.importer().open_with_room("buffer", Access::ReadWrite, 16 * G)?;
                it.imports.extend([first, second]);
                Ok(())
            },
            Between::check,
        ),
        Case::new(
            "share::open_from_an_owner_that_fails",
            &["Importer::open"],
            || Between { owner_fails: true, ..connected() },
            |it| {
                let import = it.importer().open("buffer", Access::Read)?;
                it.imports.push(import);
                Ok(())
            },
            Between::check,
        ),
        Case::new(
            "share::refresh",
            &["Import::refresh"],
            changed,
            |it| done(it.first().refresh(SOON)),
            Between::check,
        ),
        Case::new(
            "share::reopen",
            &["Import::reopen"],
            || {
                let it = changed();
                it.first().refresh(SOON).unwrap();
                it
            },
            |it| {
                let import = it.first().reopen(32 * G)?;
                it.imports.push(import);
                Ok(())
            },
            Between::check,
        ),
        Case::new(
            "share::bytes",
            &["Import::read", "Import::write"],
            imported,
            |it| {
                let mut byte = [0];
                it.first().read(0, &mut byte)?;
                Ok(it.first().write(0, &byte)?)
            },
            Between::check,
        ),
        Case::new(
            "share::use_on",
            &["Import::use_on", "ImportUse::drop"],
            imported,
            |it| {
                drop(it.first().use_on(&it.stream)?);
                Ok(())
            },
            Between::check,
        )
        .quiet(),
        Case::new(
            "share::drop",
            &["Import::drop", "retry_leftovers"],
            || {
                let it = imported();
                drop(it.first().use_on(&it.stream).unwrap());
                it
            },
            |it| {
                it.imports.clear();
                Ok(())
            },
            |_| {
                retry_leftovers();
            },
        )
        .quiet(),
    ]
}

fn owners() -> Vec<Case> {
    vec![
        Case::new(
            "share::offer",
            &["Exporter::offer", "ExporterBuilder::bind", "Offer::wait_ready"],
            || Between { owner_fails: true, ..imported() },
            |it| {
                // Nothing is asked of the driver before somebody opens it, but a look at the pieces.
                let exporter = it.exporter.as_ref().unwrap();
                let offer = exporter.offer("again", it.buffer(), Offered::Read)?;
                offer.wait_ready(SOON)?;
                let import = it.importer().open("again", Access::Read)?;
                it.offers.push(offer);
                it.imports.push(import);
                Ok(())
            },
            Between::check,
        ),
        Case::new(
            "share::publish",
            &["Offer::publish", "Import::wait_published"],
            || Between { owner_fails: true, ..imported() },
            |it| {
                let sequence = it.offers[0].publish(&it.stage.streams[0])?;
                Ok(it.first().wait_published(sequence, &it.stream, SOON)?)
            },
            Between::check,
        ),
        Case::new(
            "owner::connect",
            &["OwnerClient::connect"],
            owned,
            |it| {
                let address = it.owner.as_ref().unwrap().address().clone();
                it.client = Some(OwnerClient::connect(&address, it.options())?);
                Ok(())
            },
            |it| assert!(it.client().is_owner_alive()),
        ),
        Case::new(
            "owner::create_or_find",
            &["OwnerClient::create_or_find", "OwnerClient::open"],
            owned,
            |it| {
                let wanted = NamedBuffer::new("kv", 2 * G).chunk_bytes(G).others_write(true);
                let (first, _) = it.client().create_or_find(&wanted)?;
                first.write(0, &[5])?;
                let second = it.client().open("kv", Access::Read)?;
                let mut found = [0];
                second.read(0, &mut found)?;
                assert_eq!(found, [5]);
                Ok(())
            },
            |it| assert_eq!(it.owner.as_ref().unwrap().status().buffers.len(), 1),
        ),
    ]
}

pub(crate) fn cases() -> Vec<Case> {
    // What imports could not give back is one list for the process.
    [imports(), owners()].into_iter().flatten().map(Case::alone).collect()
}
