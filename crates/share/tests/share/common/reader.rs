//! The importer as second process.

use std::sync::Arc;
use std::time::Duration;

use vmm_share::{Access, Address, Import, Importer, ImporterOptions, ShareError};
use vmm_sys::sim::Sim;

use super::second::Answers;
use super::{SOON, machine};

struct Reader {
    sim: Arc<Sim>,
    importer: Option<Importer>,
    import: Option<Import>,
}

pub(super) fn kind(error: &ShareError) -> String {
    let text = format!("{error:?}");
    text.split([' ', '{']).next().unwrap_or_default().to_owned()
}

/// What the second process does as an importer.
pub(crate) fn answers(address: Address) -> Answers {
    let (sim, driver) = machine(2);
    let mut reader = Some(Reader { sim, importer: None, import: None });
    Box::new(move |words| {
        if words == ["end"] {
            let Reader { sim, importer, import } = reader.take()?;
            drop((import, importer));
            return Some(super::left(&sim));
        }
        let reader = reader.as_mut()?;
        let mut done = || -> Result<String, ShareError> {
            Ok(match words {
                ["connect"] => {
                    let options = ImporterOptions::new(driver.clone()).timeout(SOON);
                    reader.importer = Some(Importer::connect(&address, options)?);
                    "connected".to_owned()
                }
                // In words, why there is no connection.
                ["why"] => {
                    let options = ImporterOptions::new(driver.clone()).timeout(SOON);
                    let connected = Importer::connect(&address, options);
                    connected.err().map_or("connected".to_owned(), |error| error.to_string())
                }
                ["open"] => {
                    let importer = reader.importer.as_ref().unwrap();
                    reader.import = Some(importer.open("buffer", Access::ReadWrite)?);
                    "opened".to_owned()
                }
                ["refresh"] => {
                    let patience = Duration::from_secs(5);
                    let refreshed = reader.import.as_ref().unwrap().refresh(patience)?;
                    refreshed.came_bytes.to_string()
                }
                ["fork"] => super::in_fork(|| {
                    let asked = reader.import.as_ref().unwrap().refresh(SOON);
                    assert!(matches!(asked, Ok(_) | Err(ShareError::Forked { .. })));
                    drop((reader.import.take(), reader.importer.take()));
                }),
                ["rounds", rounds] => {
                    for _ in 0..rounds.parse::<u64>().unwrap() {
                        let options = ImporterOptions::new(driver.clone()).timeout(SOON);
                        let importer = Importer::connect(&address, options)?;
                        let import = importer.open("buffer", Access::ReadWrite)?;
                        import.read(0, &mut [0])?;
                        drop((import, importer));
                    }
                    reader.sim.ledger_summary().reserved_bytes.to_string()
                }
                ["check"] => format!("{:?}", reader.import.as_ref().unwrap().check()),
                ["read", offset] => {
                    let mut byte = [0];
                    let import = reader.import.as_ref().unwrap();
                    import.read(offset.parse().unwrap(), &mut byte)?;
                    byte[0].to_string()
                }
                ["close"] => {
                    reader.import = None;
                    "closed".to_owned()
                }
                other => panic!("no such order: {other:?}"),
            })
        };
        Some(done().unwrap_or_else(|error| kind(&error)))
    })
}
