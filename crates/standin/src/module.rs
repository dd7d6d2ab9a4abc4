//! Modules: images whose entries are looked up by name.
//!
//! Of PTX text the names of the entries are read; of a cubin those that its section names tell. What
//! the code does is not looked at: a kernel that is known by its name ([`crate::kernels`]) runs, any
//! other is `CUDA_ERROR_NOT_FOUND`, unless the environment says that those do nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;

use vmm_sys::{DeviceId, ResultCode};

use crate::door::{Done, Out, Refusal};
use crate::function::Attributes;
use crate::kernels::{self, Kernel};
use crate::machine::{current, machine};

/// What the image says of its entries.
#[derive(Debug, PartialEq, Eq)]
enum Entries {
    Named(BTreeSet<String>),
    /// A fatbin: mostly packed, so nothing can be read.
    Unknown,
}

#[derive(Debug)]
struct Module {
    device: DeviceId,
    entries: Entries,
}

/// A function of a module.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) module: u64,
    pub(crate) device: DeviceId,
    pub(crate) kernel: Kernel,
    pub(crate) attributes: Attributes,
    name: String,
}

/// Everything that is loaded. Handles are never given out twice.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    modules: BTreeMap<u64, Module>,
    functions: BTreeMap<u64, Function>,
    last: u64,
}

const HANDLE_BASE: u64 = 0x30D0_0000_0000;
const HANDLE_STEP: u64 = 0x40;

impl Modules {
    fn next_handle(&mut self) -> u64 {
        self.last += 1;
        HANDLE_BASE + self.last * HANDLE_STEP
    }

    fn load(&mut self, device: DeviceId, entries: Entries) -> u64 {
        let handle = self.next_handle();
        self.modules.insert(handle, Module { device, entries });
        handle
    }

    fn unload(&mut self, handle: u64) -> Done {
        if self.modules.remove(&handle).is_none() {
            return Err(no_handle("module", handle));
        }
        self.functions.retain(|_, function| function.module != handle);
        Ok(())
    }

    fn function_named(&mut self, module: u64, name: &str, ignore: bool) -> Result<u64, Refusal> {
        let loaded = self.modules.get(&module).ok_or_else(|| no_handle("module", module))?;
        let is_there = match &loaded.entries {
            Entries::Named(names) => names.contains(name),
            Entries::Unknown => ignore,
        };
        let kernel = kernels::by_name(name).or(ignore.then_some(Kernel::Nothing));
        let Some(kernel) = kernel.filter(|_| is_there) else {
            let why = match is_there {
                true => format!("the stand-in does not know what kernel {name} does"),
                false => format!("the module has no entry {name}"),
            };
            return Err(Refusal::new(ResultCode::NOT_FOUND, why));
        };
        let device = loaded.device;
        let known = |it: &&Function| it.module == module && it.name == name;
        if let Some((handle, _)) = self.functions.iter().find(|(_, it)| known(it)) {
            return Ok(*handle);
        }
        let handle = self.next_handle();
        let (attributes, name) = (Attributes::default(), name.to_owned());
        let function = Function { module, device, kernel, attributes, name };
        self.functions.insert(handle, function);
        Ok(handle)
    }

    /// What a function handle names.
    pub(crate) fn function(&self, handle: u64) -> Result<&Function, Refusal> {
        self.functions.get(&handle).ok_or_else(|| no_handle("function", handle))
    }

    /// What was set of a function, to change.
    pub(crate) fn attributes_of(&mut self, handle: u64) -> Result<&mut Attributes, Refusal> {
        let function = self.functions.get_mut(&handle);
        function.map(|it| &mut it.attributes).ok_or_else(|| no_handle("function", handle))
    }

    /// The context of a device has ended, and its modules with it.
    pub(crate) fn forget(&mut self, device: DeviceId) {
        self.modules.retain(|_, module| module.device != device);
        self.functions.retain(|_, function| function.device != device);
    }
}

fn no_handle(what: &str, handle: u64) -> Refusal {
    Refusal::new(ResultCode::INVALID_HANDLE, format_args!("no {what} {handle:#x}"))
}

const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
const FATBIN_MAGIC: [u8; 4] = 0xBA55_ED50_u32.to_le_bytes();

/// The names after each `.entry` of PTX text.
fn entries_of_ptx(text: &str) -> BTreeSet<String> {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code: Vec<&str> = code.collect();
    let code = code.join("\n");
    let is_name = |letter: char| letter.is_alphanumeric() || "_$%".contains(letter);
    code.split(".entry")
        .skip(1)
        .map(|rest| rest.trim_start().chars().take_while(|letter| is_name(*letter)).collect())
        .collect()
}

/// The names of the sections `.text.NAME` in a cubin.
fn entries_of_cubin(image: &[u8]) -> BTreeSet<String> {
    const PREFIX: &[u8] = b"\0.text.";
    let starts = (0..image.len()).filter(|at| image[*at..].starts_with(PREFIX));
    let name = |at: usize| {
        let rest = &image[at + PREFIX.len()..];
        let end = rest.iter().position(|byte| *byte == 0)?;
        String::from_utf8(rest[..end].to_vec()).ok()
    };
    starts.filter_map(name).collect()
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The bytes of an ELF image, by its own header: its section headers come last.
fn elf_bytes(header: &[u8]) -> usize {
    let number = |at: usize, bytes: usize| little_endian(&header[at..at + bytes]);
    let end = number(0x28, 8).saturating_add(number(0x3A, 2) * number(0x3C, 2));
    usize::try_from(end).unwrap_or(0)
}

/// Compares byte by byte, and stops at the first that differs.
///
/// # Safety
/// There are as many bytes as are alike, and one more.
unsafe fn begins_with(image: *const u8, magic: [u8; 4]) -> bool {
    // SAFETY: all bytes before this one were alike, so the caller says that it is there.
    magic.iter().enumerate().all(|(at, byte)| unsafe { image.add(at).read() } == *byte)
}

/// Reads an image of unknown length: each kind tells it by its own rules.
///
/// # Safety
/// The image is whole: nul-terminated PTX text, a cubin or a fatbin.
unsafe fn entries_at(image: *const u8) -> Result<Entries, Refusal> {
    // SAFETY: the caller says that the image is whole, and a text ends in a byte that neither has.
    let begins = |magic: [u8; 4]| unsafe { begins_with(image, magic) };
    if begins(FATBIN_MAGIC) {
        return Ok(Entries::Unknown);
    }
    if begins(ELF_MAGIC) {
        const HEADER: usize = 64;
        // SAFETY: the caller says that the image is whole, so it has its header.
        let header = unsafe { std::slice::from_raw_parts(image, HEADER) };
        let bytes = elf_bytes(header).max(HEADER);
        // SAFETY: the header of a whole image says how long it is.
        let image = unsafe { std::slice::from_raw_parts(image, bytes) };
        return Ok(Entries::Named(entries_of_cubin(image)));
    }
    // SAFETY: the caller says that it is nul-terminated text, then.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    text_entries(&text)
}

fn text_entries(text: &str) -> Result<Entries, Refusal> {
    match text.contains(".version") {
        true => Ok(Entries::Named(entries_of_ptx(text))),
        false => {
            let why = "the image is no PTX text (no .version), no cubin and no fatbin";
            Err(Refusal::new(ResultCode::INVALID_IMAGE, why))
        }
    }
}

fn load_data(module: *mut u64, image: *const c_void) -> Done {
    let out = Out::new(module)?;
    let (_, device) = current()?;
    if image.is_null() {
        return Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of an image"));
    }
    // SAFETY: not null, and the caller of the entry point passes a whole image.
    let entries = unsafe { entries_at(image.cast()) }?;
    out.set(machine()?.modules.lock().load(device, entries))
}

/// A text of the caller.
fn text_of<'a>(place: *const c_char) -> Result<&'a CStr, Refusal> {
    match place.is_null() {
        true => Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of a name")),
        // SAFETY: not null, and the caller has a nul-terminated text there during the call.
        false => Ok(unsafe { CStr::from_ptr(place) }),
    }
}

entries! {
    fn cuModuleLoadData(module: *mut u64, image: *const c_void) {
        load_data(module, image)
    }

    /// Options are for a compiler, and there is none.
    fn cuModuleLoadDataEx(
        module: *mut u64, image: *const c_void,
        _count: u32, _options: *mut c_void, _values: *mut c_void,
    ) {
        load_data(module, image)
    }

    fn cuModuleLoad(module: *mut u64, path: *const c_char) {
        let path = std::ffi::OsStr::from_bytes(text_of(path)?.to_bytes());
        let mut image = std::fs::read(path)
            .map_err(|error| Refusal::new(ResultCode::FILE_NOT_FOUND, error))?;
        // So that text ends, and a header can be read whatever is in the file.
        image.resize(image.len() + 64, 0);
        if image.starts_with(&ELF_MAGIC) && elf_bytes(&image[..64]) > image.len() {
            return Err(Refusal::new(ResultCode::INVALID_IMAGE, "the file is cut off"));
        }
        load_data(module, image.as_ptr().cast())
    }

    fn cuModuleUnload(module: u64) {
        current()?;
        machine()?.modules.lock().unload(module)
    }

    fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) {
        let out = Out::new(function)?;
        let name = text_of(name)?.to_string_lossy();
        let machine = machine()?;
        out.set(machine.modules.lock().function_named(module, &name, machine.ignore_kernels)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_entries_of_text_are_read_and_comments_are_not() {
        let text = ".version 8.0\n// .entry no()\n.visible .entry one(\n.param .u64 p)\n{ ret; }\n\
                    .entry\n  two_$x () { ret; }\n.func three() { ret; }";
        assert_eq!(text_entries(text).unwrap(), Entries::Named(names(&["one", "two_$x"])));
        let refused = text_entries("#include <stdio.h>").unwrap_err();
        assert!(format!("{refused:?}").contains("INVALID_IMAGE"), "{refused:?}");
    }

    #[test]
    fn the_entries_of_a_cubin_are_its_text_sections() {
        let image = b"\x7fELF....\0.shstrtab\0.text.add_one_u32\0.nv.info.add_one_u32\0.text.sum\0";
        assert_eq!(entries_of_cubin(image), names(&["add_one_u32", "sum"]));
    }

    #[test]
    fn functions_go_with_their_module() {
        let mut modules = Modules::default();
        let entries = Entries::Named(names(&["fill_u32", "mine"]));
        let module = modules.load(DeviceId(0), entries);
        let function = modules.function_named(module, "fill_u32", false).unwrap();
        assert_eq!(modules.function_named(module, "fill_u32", false).unwrap(), function);
        assert_eq!(modules.function(function).unwrap().kernel, Kernel::FillU32);
        assert!(modules.function_named(module, "mine", false).is_err(), "not known");
        assert!(modules.function_named(module, "copy_u32", true).is_err(), "not in the module");
        let mine = modules.function_named(module, "mine", true).unwrap();
        assert_eq!(modules.function(mine).unwrap().kernel, Kernel::Nothing);
        modules.unload(module).unwrap();
        assert!(modules.function(function).is_err() && modules.unload(module).is_err());
    }
}
