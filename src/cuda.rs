//! A real computation on each GPU through the CUDA driver API, which the driver brings (`libcuda.so.1`).
//!
//! Nothing of NVIDIA's toolkit is needed: the kernel is PTX, which the driver compiles for the GPU at hand. It runs in a
//! child process, since a GPU that has gone can hang the library.

use std::{
    ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void},
    ptr,
};

use libloading::{Library, Symbol};

/// The child's command.
pub const COMMAND: &str = "cuda-compute";
pub const LIBRARY: &str = "libcuda.so.1";

/// Elements, and threads in a block: no multiple of each other, so that the bound of the kernel is tried too.
const ELEMENTS: u32 = 100_003;
const BLOCK: u32 = 256;

/// `c[i] = 3 * a[i] + b[i]`. Of an instruction set that every GPU since 2014 runs; the driver compiles it further.
const PTX: &CStr = cr"
.version 6.0
.target sm_50
.address_size 64
.visible .entry triple_and_add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n)
{
  .reg .pred %out;
  .reg .b32 %i, %n, %x, %y, %block, %size, %thread;
  .reg .b64 %pa, %pb, %pc, %offset;
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %i, %block, %size, %thread;
  ld.param.u32 %n, [n];
  setp.ge.u32 %out, %i, %n;
  @%out bra DONE;
  ld.param.u64 %pa, [a];
  ld.param.u64 %pb, [b];
  ld.param.u64 %pc, [c];
  cvta.to.global.u64 %pa, %pa;
  cvta.to.global.u64 %pb, %pb;
  cvta.to.global.u64 %pc, %pc;
  mul.wide.u32 %offset, %i, 4;
  add.u64 %pa, %pa, %offset;
  add.u64 %pb, %pb, %offset;
  add.u64 %pc, %pc, %offset;
  ld.global.u32 %x, [%pa];
  ld.global.u32 %y, [%pb];
  mad.lo.u32 %y, %x, 3, %y;
  st.global.u32 [%pc], %y;
DONE:
  ret;
}
";
const ENTRY: &CStr = c"triple_and_add";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{LIBRARY} is not there or does not load: {0}")]
    Library(#[from] libloading::Error),
    #[error("the driver says {name} ({code}) to {call}")]
    Driver { call: &'static str, code: c_int, name: String },
    #[error("the driver has no GPU")]
    NoGpu,
    #[error("GPU {gpu}: {source}")]
    Gpu { gpu: c_int, source: Box<Error> },
    #[error("element {index} should be {right} and is {wrong}: the GPU computes wrongly")]
    Wrong { index: usize, right: u32, wrong: u32 },
}

type Status = c_int;
type DevicePtr = u64;
type Handle = *mut c_void;

/// Computes on every GPU, and returns how many there are.
pub fn compute(library: &OsStr) -> Result<c_int, Error> {
    // SAFETY: the initialisers of NVIDIA's library expect nothing of their caller.
    let library = unsafe { Library::new(library)? };
    let cuda = Cuda { library: &library };
    cuda.init()?;
    let count = cuda.count()?;
    if count == 0 {
        return Err(Error::NoGpu);
    }
    for gpu in 0..count {
        cuda.compute_on(gpu).map_err(|source| Error::Gpu { gpu, source: Box::new(source) })?;
    }
    Ok(count)
}

struct Cuda<'a> {
    library: &'a Library,
}

/// A call into the library: the types stand beside the name, as in `cuda.h`.
macro_rules! call {
    ($cuda:expr, $name:literal, ($($type:ty),*), ($($argument:expr),*)) => {{
        // SAFETY: the name has this type in cuda.h since CUDA 4, and every pointer is valid for the length of the call.
        let status = unsafe {
            let function: Symbol<unsafe extern "C" fn($($type),*) -> Status> = $cuda.library.get(concat!($name, "\0").as_bytes())?;
            function($($argument),*)
        };
        $cuda.check($name, status)
    }};
}

impl Cuda<'_> {
    fn check(&self, call: &'static str, code: Status) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let mut text: *const c_char = ptr::null();
        // SAFETY: as in cuda.h; the text is the library's and lives as long as it, and is copied here.
        let name = unsafe {
            match self.library.get::<unsafe extern "C" fn(Status, *mut *const c_char) -> Status>(b"cuGetErrorName\0") {
                Ok(get) if get(code, &raw mut text) == 0 && !text.is_null() => {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
                Ok(_) | Err(_) => "an unknown error".to_owned(),
            }
        };
        Err(Error::Driver { call, code, name })
    }

    fn init(&self) -> Result<(), Error> {
        call!(self, "cuInit", (c_uint), (0))
    }

    fn count(&self) -> Result<c_int, Error> {
        let mut count = 0;
        call!(self, "cuDeviceGetCount", (*mut c_int), (&raw mut count))?;
        Ok(count)
    }

    fn compute_on(&self, gpu: c_int) -> Result<(), Error> {
        let mut device: c_int = 0;
        let mut context: Handle = ptr::null_mut();
        call!(self, "cuDeviceGet", (*mut c_int, c_int), (&raw mut device, gpu))?;
        call!(self, "cuDevicePrimaryCtxRetain", (*mut Handle, c_int), (&raw mut context, device))?;
        let done = call!(self, "cuCtxSetCurrent", (Handle), (context)).and_then(|()| self.launch());
        let released = call!(self, "cuDevicePrimaryCtxRelease_v2", (c_int), (device));
        done.and(released)
    }

    /// Memory and module go with the context.
    fn launch(&self) -> Result<(), Error> {
        let a: Vec<u32> = (0..ELEMENTS).collect();
        let b: Vec<u32> = (0..ELEMENTS).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let mut c = vec![0u32; a.len()];
        let bytes = size_of_val(a.as_slice());
        let mut module: Handle = ptr::null_mut();
        let mut function: Handle = ptr::null_mut();
        call!(self, "cuModuleLoadData", (*mut Handle, *const c_void), (&raw mut module, PTX.as_ptr().cast()))?;
        call!(
            self,
            "cuModuleGetFunction",
            (*mut Handle, Handle, *const c_char),
            (&raw mut function, module, ENTRY.as_ptr())
        )?;
        let mut on_gpu: [DevicePtr; 3] = [0; 3];
        for pointer in &mut on_gpu {
            call!(self, "cuMemAlloc_v2", (*mut DevicePtr, usize), (ptr::from_mut(pointer), bytes))?;
        }
        for (to, from) in [(on_gpu[0], &a), (on_gpu[1], &b)] {
            call!(self, "cuMemcpyHtoD_v2", (DevicePtr, *const c_void, usize), (to, from.as_ptr().cast(), bytes))?;
        }
        let mut count = ELEMENTS;
        let mut arguments: [*mut c_void; 4] = [
            (&raw mut on_gpu[0]).cast(),
            (&raw mut on_gpu[1]).cast(),
            (&raw mut on_gpu[2]).cast(),
            (&raw mut count).cast(),
        ];
        call!(
            self,
            "cuLaunchKernel",
            (
                Handle,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                Handle,
                *mut *mut c_void,
                *mut *mut c_void
            ),
            (
                function,
                ELEMENTS.div_ceil(BLOCK),
                1,
                1,
                BLOCK,
                1,
                1,
                0,
                ptr::null_mut(),
                arguments.as_mut_ptr(),
                ptr::null_mut()
            )
        )?;
        call!(self, "cuCtxSynchronize", (), ())?;
        call!(self, "cuMemcpyDtoH_v2", (*mut c_void, DevicePtr, usize), (c.as_mut_ptr().cast(), on_gpu[2], bytes))?;
        for (index, ((a, b), wrong)) in a.iter().zip(&b).zip(c).enumerate() {
            let right = a.wrapping_mul(3).wrapping_add(*b);
            if wrong != right {
                return Err(Error::Wrong { index, right, wrong });
            }
        }
        Ok(())
    }
}
