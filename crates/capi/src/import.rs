//! Buffers of other processes.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_share::{Access, Address, Import, ImportState, Importer, ImporterOptions, ShareError};

use crate::border::{not_forked, status};
use crate::driver::driver;
use crate::elastic::{VMM_ACCESS_READ, VMM_ACCESS_READ_WRITE};
use crate::failure::{self, Failure};
use crate::handle::{self, Kind};
use crate::patience;
use crate::pointers::{put, required, text};
use crate::status::vmm_pool_status as Status;
use crate::structs::{Answer, Versioned};

/// vmm_import_check: the memory is the owner's.
pub const VMM_IMPORT_CURRENT: i32 = 0;
/// vmm_import_check: the owner is changing the memory; look again.
pub const VMM_IMPORT_CHANGING: i32 = 1;
/// vmm_import_check: the owner has changed the memory; vmm_import_refresh follows.
pub const VMM_IMPORT_LAGGING: i32 = 2;
/// vmm_import_check: the owner has taken the buffer back. What is mapped stays until vmm_import_close.
pub const VMM_IMPORT_WITHDRAWN: i32 = 3;
/// vmm_import_check: the owner's process has ended. What is mapped stays, with its bytes.
pub const VMM_IMPORT_OWNER_GONE: i32 = 4;

/// A connection to a process that offers buffers. The pointer is a number: it is valid until
/// vmm_import_disconnect.
pub struct VmmImporter(());

/// A buffer of another process, mapped here. The pointer is a number: it is valid until
/// vmm_import_close.
pub struct VmmImport(());

impl Kind for VmmImporter {
    const TAG: u32 = 0x564D_0004;
    const NAME: &'static str = "vmm_importer";
}

impl Kind for VmmImport {
    const TAG: u32 = 0x564D_0005;
    const NAME: &'static str = "vmm_import";
}

/// What is known of an import.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VmmImportInfo {
    /// sizeof(vmm_import_facts), set before the call.
    pub struct_bytes: u32,
    /// The first device that has access: that on which the memory lay at the opening.
    pub device: i32,
    /// Its address here, which never changes.
    pub address: u64,
    /// Where its last memory ends.
    pub bytes: u64,
    /// The length of its chunks.
    pub chunk_bytes: u64,
    /// Counts the changes of the owner's memory: that which is mapped.
    pub generation: u64,
    /// VMM_ACCESS_READ or VMM_ACCESS_READ_WRITE.
    pub access: i32,
    /// As vmm_import_check says it.
    pub state: i32,
}

// SAFETY: integers without gaps, 4 + 4 + 4 * 8 + 4 + 4 bytes, as the assertion below says.
unsafe impl Versioned for VmmImportInfo {
    const NAME: &'static str = "vmm_import_facts";
}

const _: () = assert!(size_of::<VmmImportInfo>() == 48, "fields of later versions come behind");

/// What the handles of one kind stand for.
struct Table<T> {
    last: u32,
    live: BTreeMap<u32, Arc<T>>,
}

static IMPORTERS: Mutex<Table<Importer>> = Mutex::new(Table { last: 0, live: BTreeMap::new() });
static IMPORTS: Mutex<Table<Import>> = Mutex::new(Table { last: 0, live: BTreeMap::new() });

impl From<ShareError> for Failure {
    fn from(error: ShareError) -> Failure {
        let status = match &error {
            ShareError::Forked { .. } => Status::VMM_POOL_FORKED,
            ShareError::BadArgument { .. }
            | ShareError::TooLarge { .. }
            | ShareError::NotMapped { .. } => Status::VMM_POOL_INVALID,
            ShareError::Timeout { .. }
            | ShareError::Changing { .. }
            | ShareError::Lagging { .. } => Status::VMM_POOL_BUSY,
            ShareError::NotVisibleHere { .. } | ShareError::NotPermitted { .. } => {
                Status::VMM_POOL_NOT_SUPPORTED
            }
            ShareError::NeedsReopen { .. } => Status::VMM_POOL_OUT_OF_ADDRESSES,
            ShareError::Driver { cause, .. } => failure::of_driver(cause),
            ShareError::Pool { cause, .. } => failure::of_pool(cause),
            _ => Status::VMM_POOL_OWNER,
        };
        Failure::Share { status, words: error.to_string() }
    }
}

fn enter<T, K: Kind>(table: &Mutex<Table<T>>, value: T) -> Result<*mut K, Failure> {
    let mut table = table.lock();
    let number = handle::next(&mut table.last)?;
    table.live.insert(number, Arc::new(value));
    Ok(handle::handle(number))
}

fn find<T, K: Kind>(table: &Mutex<Table<T>>, handle: *const K) -> Result<Arc<T>, Failure> {
    not_forked()?;
    let number = handle::checked(handle)?;
    let found = table.lock().live.get(&number).cloned();
    found.ok_or_else(|| handle::unknown(handle))
}

/// Takes something out, and drops it without the table's lock.
fn end<T, K: Kind>(table: &Mutex<Table<T>>, handle: *const K) -> Result<(), Failure> {
    not_forked()?;
    let number = handle::checked(handle)?;
    let removed = table.lock().live.remove(&number);
    removed.map(drop).ok_or_else(|| handle::unknown(handle))
}

fn state(import: &Import) -> i32 {
    match import.check() {
        ImportState::Current => VMM_IMPORT_CURRENT,
        ImportState::Changing => VMM_IMPORT_CHANGING,
        ImportState::Lagging { .. } => VMM_IMPORT_LAGGING,
        ImportState::Withdrawn => VMM_IMPORT_WITHDRAWN,
        _ => VMM_IMPORT_OWNER_GONE,
    }
}

/// Connects to a process that offers buffers: one with an exporter, or `vmm-pool serve`. The address is
/// the path of its socket, or @ and a name. Each step of that process may take timeout_us microseconds.
/// *out is NULL on failure.
///
/// # Safety
/// address is NULL, or a text that ends with 0; out is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_import_connect(
    address: *const c_char,
    timeout_us: u64,
    out: *mut *mut VmmImporter,
) -> i32 {
    status(|| {
        required(out, "out")?;
        // SAFETY: writable by this function's own condition, here and below.
        unsafe { put(out, std::ptr::null_mut()) };
        not_forked()?;
        // SAFETY: the caller vouches for the text.
        let address: Address = unsafe { words(address, "address")? }.parse()?;
        let options = ImporterOptions::new(driver()?.clone()).timeout(patience(timeout_us));
        let importer = enter(&IMPORTERS, Importer::connect(&address, options)?)?;
        // SAFETY: as above.
        unsafe { put(out, importer) };
        Ok(())
    })
}

/// Ends a connection, once the imports that came by it are closed. `vmm-pool serve` holds what was opened
/// until then.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_import_disconnect(importer: *mut VmmImporter) -> i32 {
    status(|| end(&IMPORTERS, importer))
}

/// Maps the buffer of that name at an address of its own, for the devices on which its memory lies. access
/// is VMM_ACCESS_READ or VMM_ACCESS_READ_WRITE. *out is NULL on failure.
///
/// # Safety
/// name is NULL, or a text that ends with 0; out is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_import_open(
    importer: *mut VmmImporter,
    name: *const c_char,
    access: i32,
    out: *mut *mut VmmImport,
) -> i32 {
    status(|| {
        required(out, "out")?;
        // SAFETY: writable by this function's own condition, here and below.
        unsafe { put(out, std::ptr::null_mut()) };
        let importer = find(&IMPORTERS, importer)?;
        let access = match access {
            VMM_ACCESS_READ => Access::Read,
            VMM_ACCESS_READ_WRITE => Access::ReadWrite,
            _ => {
                let expected = "VMM_ACCESS_READ (1) or _READ_WRITE (3)";
                return Err(Failure::argument("access", access, expected));
            }
        };
        // SAFETY: the caller vouches for the text.
        let name = unsafe { words(name, "name")? };
        let import = enter(&IMPORTS, importer.open(&name, access)?)?;
        // SAFETY: as above.
        unsafe { put(out, import) };
        Ok(())
    })
}

/// Whether the memory that is mapped is the owner's: *out becomes VMM_IMPORT_CURRENT or another of them.
/// Costs no call of the system.
///
/// # Safety
/// out is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_import_check(import: *mut VmmImport, out: *mut i32) -> i32 {
    status(|| {
        required(out, "out")?;
        let import = find(&IMPORTS, import)?;
        // SAFETY: the caller's own condition.
        unsafe { put(out, state(&import)) };
        Ok(())
    })
}

/// Maps what the owner has now, at the same address. Work that uses memory which leaves must have ended.
/// VMM_POOL_OUT_OF_ADDRESSES: the buffer has outgrown the addresses; open it anew.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_import_refresh(import: *mut VmmImport, patience_us: u64) -> i32 {
    status(|| {
        find(&IMPORTS, import)?.refresh(patience(patience_us))?;
        Ok(())
    })
}

/// What is known of the import now.
///
/// # Safety
/// out has as many writable bytes as its first field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_import_info(import: *mut VmmImport, out: *mut VmmImportInfo) -> i32 {
    status(|| {
        // SAFETY: the caller's own condition.
        let answer = unsafe { Answer::to(out)? };
        let import = find(&IMPORTS, import)?;
        answer.give(&VmmImportInfo {
            struct_bytes: 0,
            device: import.devices().first().map_or(-1, |device| device.0 as i32),
            address: import.address(),
            bytes: import.bytes(),
            chunk_bytes: import.chunk_bytes(),
            generation: import.generation(),
            access: match import.access() {
                Access::Read => VMM_ACCESS_READ,
                Access::ReadWrite => VMM_ACCESS_READ_WRITE,
            },
            state: state(&import),
        });
        Ok(())
    })
}

/// Unmaps an import. Work that uses it must have ended.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_import_close(import: *mut VmmImport) -> i32 {
    status(|| end(&IMPORTS, import))
}

/// A text that has to be there.
///
/// # Safety
/// As [`text`].
unsafe fn words(from: *const c_char, name: &'static str) -> Result<String, Failure> {
    // SAFETY: the caller's own condition.
    let text = unsafe { text(from, name)? };
    text.ok_or_else(|| Failure::argument(name, "NULL", "a text"))
}
