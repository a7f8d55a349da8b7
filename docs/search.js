// The search ignores case. The page of exactly the name that was typed comes first: `Plan` is not
// `plan`, and `functional.dropout` is not `Dropout`; a member (`Plan.findings`) is on the page of its
// class. Enter opens the result of the highest score.
const found = document.querySelector(".md-search-result__list");

new MutationObserver(() => {
  const query = document.querySelector(".md-search__input").value.trim();
  const typed = query.replace(/^dropblock_hooks\./, "").replaceAll(".", "/");
  const links = [...found.querySelectorAll(":scope > li > a")];
  const pageOf = (name) => links.find((link) => link.pathname.endsWith(`/${name}.html`));
  const own = pageOf(typed) ?? pageOf(typed.replace(/\/\w+$/, ""));
  if (own && own !== links[0]) {
    own.firstElementChild.dataset.mdScore = "Infinity";
    found.prepend(own.parentElement);
  }
}).observe(found, { childList: true });
